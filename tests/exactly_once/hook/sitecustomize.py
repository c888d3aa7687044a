"""On the path of Spark's Python workers in rounds of kills: the one that commits may have to die in the
middle."""

import os

if os.environ.get("EXACTLY_ONCE_TESTS_DIE_BEFORE_COMMIT"):
    from tests.exactly_once import dying

    dying.install(int(os.environ[dying.VARIABLE]), dying.kill_jvm)
