"""Figures -> one offline HTML page a profile, and a gallery of many."""

from ropelens.report.gallery import write_index as write_index
from ropelens.report.page import write_report as write_report
from ropelens.report.sentences import describe as describe
