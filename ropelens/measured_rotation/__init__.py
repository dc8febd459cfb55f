"""The rotation of each layer: measured, stated and configured."""
