"""For tests of kvfs and of code that uses it: a file system with injected faults, a clock that the test sets, bytes
that every process can check, and what every adapter of an engine, and every object store, must do.

The names are those of ``faulty_files``, ``engine_contract`` and ``object_store_contract`` in this package.
"""

from __future__ import annotations

from kvfs.testing.engine_contract import Engine as Engine
from kvfs.testing.engine_contract import EngineContract as EngineContract
from kvfs.testing.faulty_files import ACTIONS as ACTIONS
from kvfs.testing.faulty_files import KINDS as KINDS
from kvfs.testing.faulty_files import Call as Call
from kvfs.testing.faulty_files import DictOracle as DictOracle
from kvfs.testing.faulty_files import FakeClock as FakeClock
from kvfs.testing.faulty_files import Fault as Fault
from kvfs.testing.faulty_files import FaultyFiles as FaultyFiles
from kvfs.testing.faulty_files import Prompts as Prompts
from kvfs.testing.faulty_files import page_content as page_content
from kvfs.testing.object_store_contract import ObjectStoreContract as ObjectStoreContract
