"""A hook of MkDocs: adds README.md and README.zh.md, which are outside of docs/, to the site.

In docs/ they are start.md and zh/start.md. Links between them and the other pages are adapted.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# The page, the file, and what to replace in its links.
START_PAGES = {
    "start.md": ("README.md", {"](docs/": "](", "](README.zh.md": "](zh/start.md"}),
    "zh/start.md": (
        "README.zh.md",
        {"](docs/zh/": "](", "](docs/": "](../", "](README.md": "](../start.md"},
    ),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the start pages."""
    for page, (path, links) in START_PAGES.items():
        content = (ROOT / path).read_text(encoding="utf-8")
        for old, new in links.items():
            content = content.replace(old, new)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links to the README files lead to the start pages."""
    if page.file.src_uri in START_PAGES:
        return markdown
    up = "../" * (page.file.src_uri.count("/") + 1)
    to_root = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}README.md", f"]({to_root}start.md")
    return markdown.replace(f"]({up}README.zh.md", f"]({to_root}zh/start.md")
