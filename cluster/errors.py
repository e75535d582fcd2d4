"""The errors that stop a command of `kvasir`, each with one sentence for its user.

ClusterError
├── AlreadyRunning      another `kvasir up` owns the run directory
├── NotRunning          the command needs a running cluster
└── StartFailed         some part of a cluster would not start
"""


class ClusterError(Exception):
    exit_code = 2


class AlreadyRunning(ClusterError):
    pass


class NotRunning(ClusterError):
    exit_code = 1


class StartFailed(ClusterError):
    pass
