"""Collectives as another version of torch may have them."""

from dataclasses import replace
from multiprocessing.connection import Connection

from ddpnb.compat import torch_internals
from ddpnb.rank.collectives.mismatch import missing_features
from ddpnb.rank.collectives.table import METHODS


def missing_features_without_gather(pipe: Connection) -> None:
    usual = missing_features()
    METHODS["gather"] = replace(METHODS["gather"], operation="gather_of_another_version_")
    METHODS["reduce"] = replace(METHODS["reduce"], root=0)
    is_on = torch_internals.intercepts_collectives.works
    pipe.send((usual, missing_features(), is_on))
