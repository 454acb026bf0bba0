"""The kernels and the functions that tune and launch them."""

import cuda.tile as ct
import torch
from cuda.tile.tune import exhaustive_search


@ct.kernel
def scale_kernel(x, out, factor, TILE: ct.Constant[int]):
    """Multiply a vector by a number."""
    tile = ct.load(x, index=(ct.bid(0),), shape=(TILE,)) * factor
    ct.store(out, index=(ct.bid(0),), tile=ct.astype(tile, out.dtype))


_scale_tuned = {}


def scale(x, factor):
    out, stream, n = torch.empty_like(x), torch.cuda.current_stream(), x.numel()
    if n not in _scale_tuned:
        grid_fn, args_fn = lambda tile: (ct.cdiv(n, tile),), lambda tile: (x, out, factor, tile)
        result = exhaustive_search([256, 1024], stream, grid_fn, scale_kernel, args_fn, quiet=True)
        _scale_tuned[n] = result.best.config
    tile = _scale_tuned[n]
    ct.launch(stream, (ct.cdiv(n, tile),), scale_kernel, (x, out, factor, tile))
    return out


@ct.kernel
def add_kernel(x, y, TILE: ct.Constant[int]):
    """Add a vector to another, in place."""
    at = (ct.bid(0),)
    ct.store(x, index=at, tile=ct.load(x, index=at, shape=(TILE,)) + ct.load(y, index=at, shape=(TILE,)))


_add_tuned = {}


def add_(x, y):
    stream, grid = torch.cuda.current_stream(), (ct.cdiv(x.numel(), 512),)
    if x.shape not in _add_tuned:
        result = exhaustive_search(
            [{"occupancy": count} for count in (1, 2, 4)],
            stream,
            lambda config: grid,
            add_kernel,
            lambda config: (x.clone(), y, 512),
            lambda config: config,
            quiet=True,
        )
        _add_tuned[x.shape] = add_kernel.replace_hints(**result.best.config)
    ct.launch(stream, grid, _add_tuned[x.shape], (x, y, 512))
    return x


@ct.kernel
def row_sum_kernel(x, out, COLS: ct.Constant[int], ROWS: ct.Constant[int]):
    """Add up the columns of each row."""
    rows = ct.load(x, index=(ct.bid(0), 0), shape=(ROWS, COLS), padding_mode=ct.PaddingMode.ZERO)
    total = ct.sum(ct.astype(rows, ct.float32), axis=1)
    ct.store(out, index=(ct.bid(0),), tile=ct.astype(total, out.dtype))


_row_sum_tuned = {}


def row_sum(x):
    out, stream = torch.empty(x.shape[0], dtype=x.dtype, device=x.device), torch.cuda.current_stream()
    space = [(rows, occupancy) for rows in (1, 4) for occupancy in (1, 2)]
    if x.shape not in _row_sum_tuned:
        result = exhaustive_search(
            space,
            stream,
            lambda config: (ct.cdiv(x.shape[0], config[0]),),
            row_sum_kernel,
            lambda config: (x, out, x.shape[1], config[0]),
            lambda config: {"occupancy": config[1]},
            quiet=True,
        )
        rows, occupancy = result.best.config
        _row_sum_tuned[x.shape] = rows, row_sum_kernel.replace_hints(occupancy=occupancy)
    rows, kernel = _row_sum_tuned[x.shape]
    ct.launch(stream, (ct.cdiv(x.shape[0], rows),), kernel, (x, out, x.shape[1], rows))
    return out
