"""Figures -> one offline HTML page a profile, and an index over many."""

from ropelens.report.index import write_index as write_index
from ropelens.report.page import write_report as write_report
from ropelens.report.reach_words import describe_reach as describe_reach
from ropelens.report.truncation_words import describe_truncation as describe_truncation
from ropelens.report.words import describe_heads as describe_heads
