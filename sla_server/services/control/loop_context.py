"""What the loops of the backends and feed-forward see of the controller they belong to.

One value for both, so that they look at the same state. It holds no state of its own: each part is changed by
the controller's one thread only, as its own module says.
"""

from __future__ import annotations

from dataclasses import dataclass

from sla_server.services.control.decision_log import DecisionLog
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.storage_faults import StorageFaults


@dataclass(frozen=True, slots=True)
class LoopContext:
    """See the module.

    Attributes:
        inventory: volumes and clients of a backend, as victims and as neighbours.
        scopes: the promises on it, and their windows.
        policy: modes, and the only one that issues caps.
        faults: backends whose storage hangs or fails.
        log: where decisions are noted.
    """

    settings: ControlSettings
    inventory: BackendInventory
    scopes: PromiseScopes
    policy: PolicyManager
    faults: StorageFaults
    log: DecisionLog
