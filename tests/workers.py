"""Which worker of several runs which tests."""


def scheduler(config, log):
    """Tests of one `xdist_group`, and the others of one file, run on one worker.

    A worker forgets what a module compiled when it leaves the module, and makes the module's
    fixtures itself. Spread over three workers, a file would be traced and set up three times.

    Returns:
      None unless `--dist loadgroup` is asked for: then xdist makes one.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupOrFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            scope = super()._split_scope(nodeid)
            return scope.split("::")[0] if scope == nodeid else scope

    return ByGroupOrFile(config, log)
