from trainer.exit_codes import first_line


def test_first_line_is_the_reason() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert first_line(ValueError(" \n")) == "ValueError"


def test_first_line_of_a_keras_error_is_its_reason() -> None:
    text = (
        "Exception encountered when calling Dense.call().\n\n\x1b[1mbad shape\x1b[0m\n\nArguments"
    )
    assert first_line(ValueError(text)) == "bad shape"
