"""A projection in Python: count and sum the orders of each customer, in a function that keeps its own state."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESULT = "customer string, orders bigint, total decimal(20,2)"


class Totals(StatefulProcessor):
    """Keeps the totals of each customer between batches."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._state = handle.getValueState("totals", "orders bigint, total decimal(20,2)")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        orders, total = self._state.get() if self._state.exists() else (0, Decimal(0))
        for part in rows:
            orders += len(part)
            total += sum(part["amount"], Decimal(0))
        self._state.update((orders, total))
        yield pd.DataFrame({"customer": [key[0]], "orders": [orders], "total": [total]})

    def close(self) -> None:
        """Nothing to release."""


def running_totals(events: DataFrame) -> DataFrame:
    """The function that `transform: {python: "totals:running_totals"}` names."""
    return (
        events.select(
            F.expr("data:customer::string").alias("customer"),
            F.expr("data:amount::decimal(20,2)").alias("amount"),
        )
        .groupBy("customer")
        .transformWithStateInPandas(Totals(), RESULT, outputMode="Update", timeMode="None")
    )
