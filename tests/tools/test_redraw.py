"""Pages in reports/ drawn again from their stored numbers."""

import shutil
from pathlib import Path

import pytest
from redraw import REPORTS, redraw

from ropelens.runtime.netcdf import open_results
from ropelens.runtime.run_record import read_record


@pytest.mark.thorough
def test_a_page_that_is_drawn_again_has_its_numbers_and_sentences(tmp_path: Path):
    stored = REPORTS / "truncation" / "babyllama105"
    folder = tmp_path / "truncation" / stored.name
    shutil.copytree(stored, folder)
    redraw(folder)
    assert read_record(folder) == read_record(stored)
    for file in folder.glob("*.nc"):
        assert open_results(file).identical(open_results(stored / file.name))
    for file in folder.glob("*.csv"):
        assert file.read_bytes() == (stored / file.name).read_bytes()
