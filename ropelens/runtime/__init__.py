"""Progress, saved state, processes, devices and result folders."""
