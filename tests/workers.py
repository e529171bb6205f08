"""The assignment of tests to the workers that run them in parallel."""


def scheduler(config, log):
    """Return a scheduler that runs each `xdist_group`, and the rest of each file, on one worker.

    A worker forgets what a module compiled when it leaves the module, and makes the module's
    fixtures itself. Spread over three workers, a file would be traced and set up three times.

    Returns:
      The scheduler, or None without `--dist loadgroup`, so that xdist makes its own.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupOrFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return scope.split("::")[0] if scope == nodeid else scope

    return ByGroupOrFile(config, log)
