#!/usr/bin/env bash
# Build the site of docs/ in site/, and fail on any warning. Installs mkdocs-material into an environment of its own in
# .venv-docs, because nothing else needs it; says so and goes on where it cannot be had.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
wanted=$(sed -n 's/^docs = \[\(.*\)\].*/\1/p' pyproject.toml)
if [ "$(cat .venv-docs/.wanted 2>/dev/null)" != "$wanted" ]; then
    [ -x .venv-docs/bin/python ] || "$python" -m venv .venv-docs
    # shellcheck disable=SC2046
    if ! .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(sed 's/", "/ /g; s/"//g' <<< "$wanted"); then
        echo "no mkdocs-material here: the site is not built"
        exit 0
    fi
    echo "$wanted" > .venv-docs/.wanted
fi
# The theme's authors print advice about future versions of mkdocs, which is no warning of a page.
NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet
echo "site: $(find site -name '*.html' ! -name 404.html | wc -l) pages in site/index.html"
