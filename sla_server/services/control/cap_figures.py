"""What a row of the decision log says of a cap: what it was and is, what its target uses and is promised.

Pure: reads what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pmdaemon.wire.rates import Rates
from sla_server.services.control.decision_log import rates_figures
from sla_server.services.control.decisions import Reason
from sla_server.services.control.groups import TargetAnswers
from sla_server.services.control.throttle import GatewayCaps, Throttle
from sla_server.services.control.usage import GatewayTable


def cap_figures(
    throttle: Throttle,
    rates: Rates | None,
    in_force: Rates,
    policy_version: int | None,
    answers: TargetAnswers,
    gateways: Mapping[str, GatewayCaps],
) -> dict[str, Any]:
    """Figures of a cap that is set, changed or released.

    Args:
        throttle: the wish.
        rates: its rates from now on; None when it has ended.
        in_force: of its target, of all wishes.
        policy_version: named when the cap is of the policy.
        answers: what is known of the target.
        gateways: what each was sent.
    """
    target, floor = throttle.target, answers.terms_of(throttle.target)
    carriers = answers.carriers_of(target)
    up = {g: table for g, table in carriers.items() if table.state == "up"}
    uses = [answers.use(table, target) for table in up.values()]
    holders, others = up, dict[str, GatewayTable]()
    if rates is not None:
        holders = {g: table for g, table in up.items() if g in gateways and target in gateways[g].issued}
        others = {g: table for g, table in carriers.items() if g not in holders}
    return {
        "throttle_id": throttle.throttle_id,
        "source": "agreed" if throttle.reason == Reason.AGREED_CAP else throttle.source,
        "before": rates_figures(throttle.noted_rates),
        "after": rates_figures(rates),
        "in_force": rates_figures(in_force),
        "use_cost_per_s": round(sum(use.cost_per_s for use in uses if use is not None), 1),
        "floor_iops": floor.floor_iops,
        "floor_bytes_per_s": floor.floor_bytes_per_s,
        "floor_cost_per_s": round(floor.floor_cost(answers.mean_cost_of(target)), 1),
        "who": throttle.who,
        "expires_us": throttle.expires_us,
        "policy_version": policy_version if throttle.reason == Reason.POLICY else None,
        "gateways": sorted(table.name or gateway_id for gateway_id, table in holders.items()),
        "without_cap": sorted(table.name or gateway_id for gateway_id, table in others.items()),
        **({"client": throttle.client} if throttle.client else {}),
        **({"group": throttle.group} if throttle.group else {}),
        **({"volumes": dict(throttle.weights)} if throttle.group_key else {}),
    }
