"""A step's block tables as compressed rows, the input format of paged GPU kernels. Plain arrays, no device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrelay.backends.backend import Int32Array, PackedRows


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Some adjacent rows of a step. Row r's pages are `page_ids[page_starts[r] : page_starts[r + 1]]`."""

    query_starts: Int32Array  # [rows + 1], from 0
    page_starts: Int32Array  # [rows + 1], from 0
    page_ids: Int32Array  # [page_starts[-1]]
    last_page_lens: Int32Array  # [rows], tokens in each row's last page including this step's; 1 to the page's size

    @property
    def num_rows(self) -> int:
        return len(self.last_page_lens)

    def take(self, first: int, last: int) -> PagedRows:
        """The rows from `first` up to `last`, as views if possible."""
        query_starts, page_starts = self.query_starts[first : last + 1], self.page_starts[first : last + 1]
        return PagedRows(
            query_starts=query_starts - query_starts[0],
            page_starts=page_starts - page_starts[0],
            page_ids=self.page_ids[page_starts[0] : page_starts[-1]],
            last_page_lens=self.last_page_lens[first:last],
        )


def page_rows(rows: PackedRows, block_size: int) -> PagedRows:
    """The step's rows, with pages up to the last token that it writes."""
    num_keys = rows.positions + rows.query_lens
    num_pages = -(-num_keys // block_size)
    used = np.arange(rows.block_tables.shape[1], dtype=np.int32) < num_pages[:, None]
    page_starts = np.zeros(len(num_pages) + 1, np.int32)
    np.cumsum(num_pages, out=page_starts[1:])
    return PagedRows(
        query_starts=rows.query_starts,
        page_starts=page_starts,
        page_ids=rows.block_tables[used],
        last_page_lens=(num_keys - (num_pages - 1) * block_size).astype(np.int32),
    )


def num_chunk_rows(rows: PackedRows) -> int:
    """The number of leading rows up to the last one with several tokens. The rows behind decode one token each."""
    chunks = np.flatnonzero(rows.query_lens > 1)
    return int(chunks[-1]) + 1 if len(chunks) else 0


def split_rows(rows: PackedRows) -> PackedRows:
    """The step with a row for each token. If a layer's keys and values are written before its attention reads any, each
    token attends to the same keys as before."""
    if len(rows.query_lens) == rows.query_starts[-1]:
        return rows
    lens = np.ones(rows.query_starts[-1], np.int32)
    return PackedRows(lens, rows.token_positions, rows.block_tables[rows.token_rows])


def pad_rows(rows: PackedRows, num_tokens: int, block: int) -> PackedRows:
    """`rows`, followed by padding rows of one token at position 0 in `block`, `num_tokens` tokens in total."""
    count, width = rows.block_tables.shape
    num_rows = count + num_tokens - int(rows.query_starts[-1])
    query_lens = np.ones(num_rows, np.int32)
    positions = np.zeros(num_rows, np.int32)
    tables = np.full((num_rows, max(width, 1)), block, np.int32)
    query_lens[:count] = rows.query_lens
    positions[:count] = rows.positions
    tables[:count, :width] = rows.block_tables
    return PackedRows(query_lens, positions, tables)
