"""A hook of MkDocs: adds README.md and README.zh.md, which are outside of docs/, to the site.

In docs/ they are start.md and zh/start.md. Links between them and the other pages are adapted. The
site opens with three_minutes.md, shows the notebook as a page, and has colours for code.
"""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
# The page, the file, and what to replace in its links.
START_PAGES = {
    "start.md": ("README.md", {"](docs/": "](", "](README.zh.md": "](zh/start.md"}),
    "zh/start.md": (
        "README.zh.md",
        {"](docs/zh/": "](", "](docs/": "](../", "](README.md": "](../start.md"},
    ),
}


# The page that opens the site in each language, in place of the list of contents.
OPENING = {"three_minutes.md": "index", "README.md": "contents"}
COLOURS = {"": "default", '[data-bs-theme="dark"] ': "github-dark"}  # Styles of Pygments.


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the start pages, the notebook and the colours; places the opening pages."""
    for file in files:
        folder, _, name = file.src_uri.rpartition("/")
        if name in OPENING:
            file.dest_uri = f"{folder}/{OPENING[name]}.html".lstrip("/")
    files.append(File.generated(config, "notebook.md", content=_notebook()))
    styles = (
        HtmlFormatter(style=style).get_style_defs(f"{theme}.codehilite")
        for theme, style in COLOURS.items()
    )
    files.append(File.generated(config, "css/code.css", content="\n".join(styles)))
    for page, (path, links) in START_PAGES.items():
        content = (ROOT / path).read_text(encoding="utf-8")
        for old, new in links.items():
            content = content.replace(old, new)
        files.append(File.generated(config, page, content=content))
    return files


def _notebook() -> str:
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    parts = ["[This notebook as a file](notebook.ipynb)"]
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    return "\n\n".join([parts[1], parts[0], *parts[2:]])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links to the README files lead to the start pages."""
    if page.file.src_uri in START_PAGES or page.file.src_uri == "notebook.md":
        return markdown
    markdown = markdown.replace("notebook.ipynb)", "notebook.md)")
    up = "../" * (page.file.src_uri.count("/") + 1)
    to_root = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}README.md", f"]({to_root}start.md")
    return markdown.replace(f"]({up}README.zh.md", f"]({to_root}zh/start.md")
