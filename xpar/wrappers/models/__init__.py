"""The plans: one small data entry per transformer class."""

from xpar.wrappers.models.plan import ModelPlan, Tokens
from xpar.wrappers.models.registry import PLANS, find_plan

__all__ = ["PLANS", "ModelPlan", "Tokens", "find_plan"]
