"""For mkdocs: README as the first page, the changelog, the examples, and the plots of benchmarks/results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Links from docs/ to files outside of it, and from README into docs/.
_OUTWARD = re.compile(r"\]\(\.\./([^)]+)\)")
_INWARD = re.compile(r"\]\(docs/([^)]+)\)")
_EXAMPLE = re.compile(r"\]\(((?:examples/)?[a-z_]+)\.(?:py|ipynb)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures that are kept elsewhere in the repository."""
    generated: dict[str, str | bytes] = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in (
            "CHANGELOG.md",
            "SECURITY.md",
            "CONTRIBUTING.md",
            "CODE_OF_CONDUCT.md",
            "packages/local_kafka/README.md",
            "examples/README.md",
        )
    }
    generated["index.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in sorted((ROOT / "examples").glob("*.py")):
        code = script.read_text(encoding="utf-8")
        generated[f"examples/{script.stem}.md"] = f"# {script.name}\n\n```python\n{code}```\n"
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        generated[f"examples/{notebook.stem}.md"] = _notebook(notebook)
    for result in sorted((ROOT / "benchmarks" / "results").iterdir()):
        generated[f"benchmarks/results/{result.name}"] = result.read_bytes()
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    return files


def _notebook(path: Path) -> str:
    """The notebook's texts and code, one after another."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the site, in which the pages of docs/ are at the top."""
    linked = markdown if "/" in page.file.src_uri else _OUTWARD.sub(r"](\1)", markdown)
    linked = _INWARD.sub(r"](\1)", linked)
    return _EXAMPLE.sub(r"](\1.md)", linked)
