"""Hooks of mkdocs: pages of the site that are made of other files of the repository, and links to those files.

Comes in: ``docs``, the notebooks in ``docs/notebooks``, ``examples``, ``CHANGELOG.md``, ``README.md``, ``tests/README.md`` and the
public names in ``kitsune_jax/__init__.py``. Goes out: the pages of the site. Pages are written with links that work in the
repository; here a link that leaves ``docs`` becomes one to the page that is made of its file, or plain text if no page is. A link
to no file at all is a warning, and an error under ``--strict``.
"""

from __future__ import annotations

import ast
import html
import json
import logging
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LOG = logging.getLogger("mkdocs.hooks")
NAMES = "<!-- public names -->"  # of the page of the API: here stands each public name
MODULES = {"config": ("config.override",)}  # of a public module: the names in it that are public
_LINK = re.compile(r"(`+).*?\1|\[([^\[\]]*)\]\(([^)\s]+)\)", re.DOTALL)  # a span of code, or a link
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2[ ]*$", re.DOTALL | re.MULTILINE)


# --- links ------------------------------------------------------------------------------------------------------------------------


def page_of(path: str, anchor: str) -> str | None:
    """The page that is made of the file ``path`` of the repository, with ``#anchor`` ("" without); ``None`` if there is none."""
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
        return (page.removesuffix(".ipynb") + ".md" if page.endswith(".ipynb") else page) + anchor
    made = {"CHANGELOG.md": "changes.md", "README.md": "index.md", "tests/README.md": "internals/tests.md"}
    sections = {"#examples": "examples/index.md", "#how-often-it-is-slower": "benchmarks.md#ordinary-functions"}
    if path == "README.md" and anchor in sections:
        return sections[anchor]
    if path in made:
        return made[path] + anchor
    name = Path(path)
    if name.parent.name == "examples" and name.suffix == ".py" and not name.name.startswith("_"):
        return f"examples/{name.stem}.md"
    return None


def links_for_site(markdown: str, page: str, folder: str) -> str:
    """``markdown`` with links that are right on ``page`` of the site; ``folder``: where in the repository they were right.

    >>> links_for_site("[a](../examples/nerf.py), [b](options.md#make), `x[0](y)`", "graphs.md", "docs")
    '[a](examples/nerf.md), [b](options.md#make), `x[0](y)`'
    >>> links_for_site("[a](docs/graphs.md), [the licence](LICENSE)", "examples/index.md", "")
    '[a](../graphs.md), the licence'
    """

    def replaced(match: re.Match[str]) -> str:
        text, target = match[2], match[3]
        if text is None or re.match(r"[a-z]+:|#", target):
            return match[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        found = page_of(path, mark + anchor)
        if found is not None:
            return f"[{text}]({posixpath.relpath(found, posixpath.dirname(page) or '.')})"
        if (ROOT / path).exists():
            return text
        LOG.warning("%s links to %s, and there is no such file", page, target)
        return match[0]

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replaced, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replaced, markdown[end:])])


# --- pages made of other files ----------------------------------------------------------------------------------------------------


def notebook(path: Path) -> str:
    """The Markdown of a notebook: its text, its code, and the outputs that are stored in it."""
    parts = [f"[Download this notebook]({path.name}){{ download }}"]
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts += [f"```python\n{source}\n```", *(_output(o, cell["metadata"].get("alt", "")) for o in cell["outputs"])]
    head, first, *rest = parts  # the title comes first
    return "\n\n".join([first, head, *rest])


def _output(output: dict[str, Any], alt: str) -> str:
    """An output as Markdown; ``alt`` describes its picture in words."""
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{"".join(data["text/html"])}\n</div>'
    if "image/png" in data:
        return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"````text\n{text.rstrip()}\n````" if text.strip() else ""


def example(path: Path) -> str:
    """A page of an example: the text of its docstring, then its code."""
    code = path.read_text()
    tree = ast.parse(code)
    text = ast.get_docstring(tree) or ""
    code = "\n".join(code.splitlines()[tree.body[0].end_lineno if text else 0 :])
    first, _, rest = text.partition("\n")
    shown = re.sub(r"(?:^ {4}.*\n?)+", _commands, rest, flags=re.MULTILINE)
    return f"# {path.name}\n\n{first}\n{shown}\n\n```python\n{code.strip()}\n```\n"


def _commands(match: re.Match[str]) -> str:
    return f"```console\n{textwrap.dedent(match[0]).rstrip()}\n```\n"


def section(markdown: str, title: str) -> str:
    """The section ``title`` of ``markdown``, as a page."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", markdown, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"README.md has no section {title}")
    return f"# {title}\n{found[1]}"


def public_names() -> list[str]:
    """The public names of the package, as its source lists them: nothing is imported."""
    tree = ast.parse((ROOT / "kitsune_jax" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    )
    ordered = sorted(names, key=lambda name: (name != "pipeline", name != "explain", name.lower()))
    return [inner for name in ordered for inner in MODULES.get(name, (name,))]


def made_pages() -> Iterator[tuple[str, str]]:
    """Names and Markdown of the pages that are made of other files, with the links of the site."""
    notebooks, examples = (ROOT / "docs" / "notebooks").glob("*.ipynb"), (ROOT / "examples").glob("[!_]*.py")
    texts = [
        ("changes.md", "", (ROOT / "CHANGELOG.md").read_text()),
        ("internals/tests.md", "tests", (ROOT / "tests" / "README.md").read_text()),
        ("examples/index.md", "", section((ROOT / "README.md").read_text(), "Examples")),
        *((f"notebooks/{path.stem}.md", "docs/notebooks", notebook(path)) for path in sorted(notebooks)),
        *((f"examples/{path.stem}.md", "examples", example(path)) for path in sorted(examples)),
    ]
    for page, folder, text in texts:
        yield page, links_for_site(text, page, folder)


# --- what mkdocs calls ------------------------------------------------------------------------------------------------------------


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for page, text in made_pages():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.generated_by:
        return markdown  # made above, with its links
    text = links_for_site(markdown, page.file.src_uri, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))
    directives = (f"::: kitsune_jax.{name}\n    options: {{heading: {name}, toc_label: {name}}}" for name in public_names())
    return text.replace(NAMES, "\n\n".join(directives))


class Sections(griffe.Extension):
    """What mkdocstrings reads of docstrings: an ``Example`` is the section that it calls ``Examples``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example::?$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
