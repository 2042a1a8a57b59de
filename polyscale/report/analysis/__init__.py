"""The analysis of a model as one interactive HTML file that opens offline."""

from polyscale.report.analysis.page import analysis_page
from polyscale.report.analysis.writing import write_analysis

__all__ = ["analysis_page", "write_analysis"]
