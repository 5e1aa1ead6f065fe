"""The rules on a board as text: nine symbols, "x" mine, "o" theirs, "." free; cells 0 to 8 row by row."""

from functools import cache

EMPTY = "."
MINE = "x"
THEIRS = "o"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def free_cells(board: str) -> list[int]:
    """Return the cells without a mark."""
    return [cell for cell, mark in enumerate(board) if mark == EMPTY]


def place(board: str, cell: int, mark: str) -> str:
    """Return the board with a mark more."""
    return board[:cell] + mark + board[cell + 1 :]


def has_line(board: str, mark: str) -> bool:
    """Say whether three marks are in a line."""
    return any(all(board[cell] == mark for cell in line) for line in LINES)


@cache
def completing_cells(board: str, mark: str) -> tuple[int, ...]:
    """Return the free cells that would complete a line of this mark."""
    return tuple(cell for cell in free_cells(board) if has_line(place(board, cell, mark), mark))


def other_side(board: str) -> str:
    """Return the board as the other player sees it."""
    return board.translate(str.maketrans(MINE + THEIRS, THEIRS + MINE))


@cache
def value(board: str) -> int:
    """Return what the mover gets with perfect play by both: 1, 0 or -1."""
    if has_line(board, THEIRS):
        return -1
    cells = free_cells(board)
    if not cells:
        return 0
    return max(-value(other_side(place(board, cell, MINE))) for cell in cells)


def best_cells(board: str) -> list[int]:
    """Return the mover's perfect moves."""
    values = {cell: -value(other_side(place(board, cell, MINE))) for cell in free_cells(board)}
    best = max(values.values())
    return [cell for cell, worth in values.items() if worth == best]
