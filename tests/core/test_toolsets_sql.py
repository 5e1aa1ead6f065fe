"""agentgym.toolsets.sql: rows are read, and nothing else can be done."""

import json
import sqlite3
import time

import pytest

from agentgym.errors import EnvError
from agentgym.messages import assistant, tool_call
from agentgym.tool_runner import ToolRunner
from agentgym.tools import ToolEnv
from agentgym.toolsets import Sql


def fill(db, context):
    db.execute("create table sales (region text, amount int, note)")
    rows = [("north", 3, None), ("south", 4, b"ab"), ("north", 5, 1.5)]
    db.executemany("insert into sales values (?, ?, ?)", rows)


def ask(runner: ToolRunner, query: str) -> str:
    answers = runner.run([tool_call("sql", json.dumps({"query": query}), "a")])
    return answers.messages[0]["content"]


@pytest.fixture
def shop():
    runner = ToolRunner([Sql(fill, timeout=0.5, max_rows=4)])
    runner.open(0)
    yield runner
    runner.close()


def test_rows_are_read_with_their_names(shop):
    assert ask(shop, "select region, amount, note from sales order by amount") == (
        "region | amount | note\nnorth | 3 | NULL\nsouth | 4 | <2 bytes>\nnorth | 5 | 1.5\n(3 rows)"
    )
    assert ask(shop, "with n as (select amount from sales) select sum(amount) as s, upper('a') from n") == (
        "s | upper('a')\n12 | A\n(1 rows)"
    )


def test_more_rows_than_allowed_are_not_shown(shop):
    answer = ask(shop, "select a.amount from sales a, sales b")
    assert answer.splitlines()[-1] == "(first 4 rows; there are more)"
    assert len(answer.splitlines()) == 6


FORBIDDEN = [
    "insert into sales values ('west', 1, null)",
    "update sales set amount = 0",
    "delete from sales",
    "drop table sales",
    "create table more (a)",
    "create temp table more (a)",
    "alter table sales add column more",
    "attach database ':memory:' as other",
    "pragma table_info(sales)",
    "pragma writable_schema = 1",
    "select * from pragma_database_list",
    "begin",
    "vacuum into 'copy.db'",
    "create index i on sales (amount)",
    "select load_extension('x')",
    "select random()",
    "explain insert into sales values ('west', 1, null)",
]


@pytest.mark.parametrize("query", FORBIDDEN)
def test_nothing_but_reading_is_allowed(shop, query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ask(shop, query).startswith("Error: ")
    assert ask(shop, "select count(*), sum(amount) from sales").splitlines()[1] == "3 | 12"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("query", ["select 1; delete from sales", "selec 1", "select * from nowhere", ""])
def test_a_wrong_statement_is_explained(shop, query):
    assert ask(shop, query).startswith(("Error: ", "\n(0 rows)"))
    assert ask(shop, "select count(*) from sales").splitlines()[1] == "3"


def test_a_query_that_never_ends_is_stopped(shop):
    started = time.monotonic()
    answer = ask(
        shop, "with recursive n(x) as (select 1 union all select x + 1 from n) select count(*) from n"
    )
    assert answer == "Error: the query took longer than 0.5 s"
    assert time.monotonic() - started < 20
    assert ask(shop, "select 1").splitlines()[1] == "1"


def test_a_value_cannot_fill_the_memory(shop):
    assert ask(shop, "select hex(zeroblob(900000000))") == "Error: string or blob too big"
    assert ask(shop, "select length(zeroblob(1000))").splitlines()[1] == "1000"


def test_a_database_file_is_read_and_stays_as_it_is(tmp_path):
    path = tmp_path / "a shop?.db"
    with sqlite3.connect(path) as db:
        fill(db, None)
    db.close()
    before = path.read_bytes()
    runner = ToolRunner([Sql(path)])
    runner.open(0)
    assert ask(runner, "select count(*) from sales").splitlines()[1] == "3"
    assert ask(runner, "delete from sales") == "Error: not authorized"
    runner.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [None, b"this is no database, however long it is" * 50])
def test_a_file_that_is_no_database_fails_the_play_by_name(tmp_path, content):
    path = tmp_path / "none.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EnvError, match=r"none\.db cannot be opened: "):
        ToolRunner([Sql(path)]).open(0)


def test_each_episode_has_rows_of_its_own_seed():
    def draw(db, context):
        db.execute("create table sales (amount int)")
        db.execute("insert into sales values (?)", (int(context.env.np_random.integers(10**9)),))

    class Sales(ToolEnv):
        toolsets = (Sql(draw),)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "?", {}

    def look(env) -> str:
        call = tool_call("sql", '{"query": "select amount from sales"}', "a")
        return env.step(assistant("", [call]))[0][0]["content"]

    first, second = Sales(), Sales()
    first.reset(seed=1)
    second.reset(seed=2)
    seen = look(first), look(second)
    assert seen[0] != seen[1]
    second.reset(seed=1)
    assert look(second) == seen[0]
