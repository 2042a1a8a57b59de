"""The studies behind the committed results: `polyscale reproduce NAME` in a checkout.

Not part of the installed package. CONTRIBUTING.md says how to add a study.
"""

from __future__ import annotations

from importlib import import_module

from polyscale.checks import check_choice
from reproduction.study import Study

# Imported when asked for: a study may need packages that the others do without.
_MODULES = {
    "documents": "reproduction.documents",
    "hkt": "reproduction.hkt",
    "hsa": "reproduction.hsa",
    "hsa-zero-shot": "reproduction.zero_shot",
}
STUDIES = tuple(_MODULES)


def find_study(name: str) -> Study:
    """The study of this name: the `STUDY` of its module.

    >>> len(find_study("hkt").plan("cpu")), len(find_study("hsa").plan("cpu"))
    (40, 69)
    """
    check_choice("study", name, STUDIES)
    return import_module(_MODULES[name]).STUDY
