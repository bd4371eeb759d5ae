"""A builder of a user's own, as docs/strategies.md showed it before files moved."""

from autograph_rewrite.strategies import AllReduce
from autograph_rewrite.strategies.assemble import assemble
from autograph_rewrite.strategies.choice import Choice, Parts


class HalvedOnServers:
    """Put matrices on servers, in two parts; add everything else up on all replicas."""

    def build(self, item, config):
        """Return the plan."""

        def choose(trained):
            if len(trained.shape) < 2:
                return Choice("all_reduce")
            return Choice("ps", Parts(0, 2))

        return assemble(item, config, choose, strategy="HalvedOnServers")


class AsAlways(AllReduce):
    """What AllReduce builds, by another name."""

    def build(self, item, config):
        """Return its plan."""
        return super().build(item, config)
