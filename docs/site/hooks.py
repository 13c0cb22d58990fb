"""What MkDocs does not know by itself: pages that are made from other files of the repository, and links to them.

Pages in docs/ link to files of the repository by relative paths, so that they work where the repository is read. On the
site, those files are pages or downloads with other addresses. MkDocs calls the functions whose names begin with `on_`.
"""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import notebooks  # after the path, because MkDocs does not load hooks as parts of a package
from public_modules import MODEL_METHODS, NOT_FOR_USERS, public_modules

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'<img [^>]*src="(concepts/[\w-]+\.svg)"[^>]*>')


def copied_pages() -> dict[Path, str]:
    """Markdown files outside of docs/ that are pages, and where."""
    pages = {
        ROOT / name: f"{Path(name).stem.lower()}.md" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    }
    pages |= {ROOT / "README.md": "index.md", ROOT / "benchmarks" / "results": "performance.md"}
    pages |= {path: f"results/{path.name}" for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))}
    for path in sorted((ROOT / "examples").rglob("README.md")):
        pages[path] = f"examples/{path.parent.name}.md"
    return pages


def tutorials() -> dict[Path, str]:
    """The scripts of the tutorials, and their pages."""
    return {path: f"tutorials/{path.stem}.md" for path in sorted((ROOT / "docs" / "tutorials").glob("*.py"))}


def downloads() -> dict[Path, str]:
    """Scripts that pages link to, and where they can be downloaded."""
    return {path: str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").rglob("*.py"))}


def api_pages() -> dict[str, str]:
    """The text of each page of the API reference."""
    pages = {
        f"api/{module}.md": f"# `{module.replace('openipu', 'ipu', 1)}`\n\n::: {module}\n"
        for module in public_modules()
    }
    hidden = ", ".join(f'"!{pattern}"' for pattern in NOT_FOR_USERS)
    pages["api/models.md"] = (
        "# Methods of models\n\nA Keras model that is made in the scope of a strategy has these methods, besides or "
        f"instead of Keras' own.\n\n::: {MODEL_METHODS}\n    options:\n      inherited_members: true\n"
        f"      filters: [{hidden}]\n"
    )
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the API reference and the tables of the benchmarks into the navigation."""
    api = [{"Overview": "api.md"}, {"Methods of models": "api/models.md"}]
    api += [{module.replace("openipu", "ipu", 1): f"api/{module}.md"} for module in public_modules()]
    results = [{Path(page).stem: page} for page in copied_pages().values() if page.startswith("results/")]
    for section in config.nav or []:
        if "Reference" in section:
            section["Reference"].append({"API": api})
        if "Performance" in section:
            section["Performance"] = [{"Overview": section["Performance"]}, {"All tables": results}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and downloads that are not in docs/."""

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for path, uri in copied_pages().items():
        if uri not in ("index.md", "performance.md"):  # these two stand in docs/ and replace what is linked to
            text = path.read_text(encoding="utf-8")
            add(uri, text if text.startswith("# ") else f"# {path.stem}\n\n{text}")
    for path, uri in tutorials().items():
        notebook = notebooks.read(path)
        add(uri.replace(".md", ".ipynb"), notebooks.as_json(notebook))
        shown = notebooks.run(notebook) if config.extra["run_tutorials"] else notebook
        page = notebooks.as_page(shown, path.stem)
        add(uri, page.markdown)
        for name, content in page.pictures.items():
            add(f"tutorials/{name}", content)
    for uri, text in api_pages().items():
        add(uri, text)
    for path, uri in downloads().items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to files of the repository to their addresses on the site."""
    addresses = {**copied_pages(), **tutorials(), **downloads()}
    sources = {uri: path for path, uri in addresses.items() if uri not in ("index.md", "performance.md")}
    uri = page.file.src_uri
    source = sources.get(uri, ROOT / "docs" / uri)

    def lead(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        address = addresses.get(target)
        if address is None and target.is_relative_to(ROOT / "docs") and target.exists():
            address = str(target.relative_to(ROOT / "docs"))
        if address is None:
            return link[0]
        return f"]({'../' * uri.count('/')}{address}{link[2] or ''})"

    return LINK.sub(lead, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put the pictures of concepts into their page, where they take on the colours of its scheme."""

    def picture(link: re.Match[str]) -> str:
        drawn = (ROOT / "docs" / link[1]).read_text(encoding="utf-8")
        return drawn.replace("<svg ", "<svg data-search-exclude ", 1)

    return PICTURE.sub(picture, html)
