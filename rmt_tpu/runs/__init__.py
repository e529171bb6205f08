"""Reading and writing of run folders: config, metrics, plots, samples and resumption."""
