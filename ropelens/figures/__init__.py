"""Labelled arrays -> plotly figures; never shown, never written."""
