"""Packs a step's rows into the arrays from which attention is planned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvrelay.backends.backend import PackedRows
from kvrelay.step.batch import WorkerRow


def pack_rows(rows: Sequence[WorkerRow]) -> PackedRows:
    """Returns the rows' lengths, positions and padded block tables as arrays."""
    table_lens = np.fromiter((len(row.block_ids) for row in rows), np.int64, len(rows))
    tables = np.zeros((len(rows), int(table_lens.max(initial=0))), np.int32)
    tables[np.arange(tables.shape[1]) < table_lens[:, None]] = np.concatenate([row.block_ids for row in rows])
    return PackedRows(
        query_lens=np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows)),
        positions=np.fromiter((row.position for row in rows), np.int32, len(rows)),
        block_tables=tables,
    )
