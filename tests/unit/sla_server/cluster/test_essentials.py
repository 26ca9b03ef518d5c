"""Essential parameters: the same digest means the same parameters, and a difference is named."""

from __future__ import annotations

import pytest

from sla_server.cluster import essentials
from sla_server.cluster.config import ClusterConfig
from sla_server.cluster.errors import EssentialsDiffer


def test_the_digest_is_that_of_the_parameters_alone() -> None:
    one = ClusterConfig(node="n1", site="a", store_bytes=1 << 30)
    other = ClusterConfig(node="n2", site="b", listen="127.0.0.1:4333")
    assert essentials.digest(essentials.of(one)) == essentials.digest(essentials.of(other))
    changed = ClusterConfig(node="n2", replicas=5)
    assert essentials.digest(essentials.of(one)) != essentials.digest(essentials.of(changed))


def test_the_digest_of_this_release_stays() -> None:
    """Another one would keep nodes of two releases apart: change ``FORMAT`` and this with intent."""
    assert essentials.digest(essentials.of(ClusterConfig(node="n1"))) == "15f057e670e613c7"


def test_parameters_come_back_from_the_tags_of_an_engine() -> None:
    config = ClusterConfig(node="n1", name="Berlin", site="West")
    shown = [tag.lower() for tag in essentials.tags(config)]
    assert essentials.of_tags(shown) == essentials.of(config)
    assert essentials.site_of_tags(shown) == "west"
    assert essentials.of_tags(["other", "region:x"]) == {}
    essentials.compare(essentials.of(config), essentials.of_tags(shown), "n2")


def test_a_difference_is_named_with_both_values() -> None:
    here = essentials.of(ClusterConfig(node="n1"))
    there = essentials.of(ClusterConfig(node="n2", replicas=5, max_payload_bytes=2 << 20))
    with pytest.raises(EssentialsDiffer) as refused:
        essentials.compare(here, there, "n2")
    assert refused.value.differences == {
        "replicas": ("3", "5"),
        "max_payload_bytes": ("1048576", "2097152"),
    }
    assert "max_payload_bytes is 1048576 here and 2097152 there, replicas is 3 here" in str(refused.value)


def test_a_node_that_shows_none_differs_in_all() -> None:
    here = essentials.of(ClusterConfig(node="n1"))
    assert essentials.differences(here, {}).keys() == here.keys()
