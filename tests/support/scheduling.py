"""How xdist deals out tests: one group after the other, each to one worker.

Its own --dist=loadgroup has the workers write the group into the test's name, which a pytest
since 9.2 does not let them: without a word it deals out every test by itself.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.support.groups import group_of


class Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
