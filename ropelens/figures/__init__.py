"""Functions that turn labelled arrays into plotly figures, without showing or writing them."""
