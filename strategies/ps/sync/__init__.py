"""`--strategy=ps --sync_replicas`: a step is the sum of the first n gradients.

No Python and no chief takes part in a round. A worker's closure is a *worker loop*: it takes
*assignments* from the queue of its *worker slot*, one after the other. There are as many worker
slots as workers; each has a queue, gradient buffers, and at most one worker loop, which any worker
may run. Each assignment has a sub-batch to compute. The *aggregator*, a loop on the parameter
server that counts the steps, assigns:

| who | does | where |
| --- | --- | --- |
| chief | plans the batches; starts the loops; watches the rounds | executor.py |
| aggregator | gives an assignment to each worker slot that waits | aggregator.py |
| worker loop | reads variables; writes its gradient; sends a message | worker_loop.py |
| aggregator | takes the first n gradients in time; applies their sum | |
| aggregator | assigns the sub-batches of late gradients again | |

They meet at the gradient buffers and the queues (gradient_buffers.py), and exchange the types of
../protocol.py. An assignment carries the step, and is taken before the variables are read. So a
gradient of variables of two steps is tagged with the older step, and dropped. If a worker dies
while it writes, its incomplete gradient is not used: see `GradientBuffers.write` for the one case
in which it is read. If a gradient is overwritten before it is summed, the complete round is
repeated: the sum is dropped, and each worker slot gets the same sub-batch again.

A worker loop ends with an assignment that is its *last*, so that closures of evaluation find idle
workers. If the worker dies, the coordinator gives the loop to another worker, or waits until the
worker comes back. The loop begins with a message, and the aggregator assigns the lost sub-batch
again.
"""
