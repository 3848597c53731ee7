"""Collectives as another version of torch may have them."""

from dataclasses import replace
from multiprocessing.connection import Connection

from ddpnb.compat import torch_internals
from ddpnb.rank.collective_checks import CollectiveChecker
from ddpnb.rank.collective_log import METHODS


def missing_features_without_gather(pipe: Connection) -> None:
    usual = CollectiveChecker().missing_features()
    METHODS["gather"] = replace(METHODS["gather"], operation="gather_of_another_version_")
    METHODS["reduce"] = replace(METHODS["reduce"], root=0)
    is_on = torch_internals.intercepts_collectives.works
    pipe.send((usual, CollectiveChecker().missing_features(), is_on))
