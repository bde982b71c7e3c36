"""Fills the generated parts of the documentation, between their markers.

``<!-- options:MODULE:CLASS -->`` the option table of a backend, from its options type
``<!-- template:PATH -->``        a file of the package that `omni-connector new` writes
``<!-- matrix -->``               the backend table, from the suite's results under ``build/contract``

``python docs/generate.py`` writes; ``--check`` only says what is out of date, and exits 1 if anything is. The matrix is not
checked: it is as new as the last full run of the suite.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from omni_connector_core.options import option_table

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = re.compile(r"(<!-- options:([\w.]+):(\w+) -->\n).*?(<!-- /options -->)", re.DOTALL)
TEMPLATE = re.compile(r"(<!-- template:(\S+) -->\n).*?(<!-- /template -->)", re.DOTALL)
MATRIX = re.compile(r"(<!-- matrix -->\n).*?(<!-- /matrix -->)", re.DOTALL)


def pages() -> list[Path]:
    """List every page that may have a generated part."""
    return sorted(
        [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/*/README.md"), *ROOT.glob("*/README.md")]
    )


def with_options(text: str) -> str:
    """Fill the option tables of a page."""

    def table(match: re.Match[str]) -> str:
        options = getattr(importlib.import_module(match[2]), match[3])
        return match[1] + option_table(options) + match[4]

    return OPTIONS.sub(table, text)


def with_template(text: str) -> str:
    """Show files of the template of a new backend."""
    if not TEMPLATE.search(text):
        return text
    from omni_connector_contract_tests.scaffold import template_files

    files = template_files()

    def block(match: re.Match[str]) -> str:
        language = "toml" if match[2].endswith(".toml") else "python"
        return f'{match[1]}```{language} title="{match[2]}"\n{files[match[2]]}```\n{match[3]}'

    return TEMPLATE.sub(block, text)


def with_matrix(text: str) -> str:
    """Fill the backend table of a page, when there are results."""
    results = sorted((ROOT / "build" / "contract").glob("*.json"))
    if not results or not MATRIX.search(text):
        return text
    from omni_connector_contract_tests.matrix import render

    return MATRIX.sub(lambda match: match[1] + render(results) + match[2], text)


def main() -> int:
    """Run the command."""
    check = "--check" in sys.argv[1:]
    stale = []
    for page in pages():
        text = page.read_text()
        new = with_template(with_options(text))
        if not check:
            new = with_matrix(new)
        if new != text:
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(new)
    for page in stale:
        print(f"{page}: {'out of date, run python docs/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
