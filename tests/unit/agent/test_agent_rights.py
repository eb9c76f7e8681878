"""The agent opens, creates, lists and runs nothing of a job with root's rights.

The agent is root where submitted jobs have accounts of their own. This test finds every operation
on a path and every process that the agent starts, and demands that it is done as an account, or is
listed below with the reason why no job can influence it. A change that adds a path adds a reason,
or `acting_as`.

Code runs as an account inside `with acting_as(...)` or `started_as(...)`, and in a private function
all of whose uses in its module do. A function that takes an `identity` or an `account` must be
given it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.support.source_tree import parsed_text, statements

pytestmark = pytest.mark.slow

AGENT = Path(__file__).parents[3] / "agent" / "rdzv" / "agent"

OF_THE_JOB = {"torch_side", "store_host", "zygote", "sitecustomize"}
"""These run in processes of the job, which have its account before they do anything."""

GUARDS = {"acting_as", "started_as"}
WHOSE = {"identity", "account"}

MODULES = {
    "os": {
        *("access", "chdir", "chflags", "chmod", "chown", "chroot", "fwalk", "getxattr", "lchmod"),
        *("lchown", "link", "listdir", "listxattr", "lstat", "makedirs", "mkdir", "mkfifo"),
        "mknod",
        *("open", "path", "pathconf", "readlink", "remove", "removedirs", "removexattr", "rename"),
        *("renames", "replace", "rmdir", "scandir", "setxattr", "stat", "statvfs", "symlink"),
        *("truncate", "unlink", "utime", "walk"),
        *("execl", "execle", "execlp", "execlpe", "execv", "execve", "execvp", "execvpe", "popen"),
        *("posix_spawn", "posix_spawnp", "spawnl", "spawnv", "spawnve", "startfile", "system"),
    },
    "subprocess": {"Popen", "call", "check_call", "check_output", "getoutput", "run"},
    "asyncio": {
        *("create_subprocess_exec", "create_subprocess_shell", "open_unix_connection"),
        "start_unix_server",
    },
    "shutil": None,
    "tempfile": None,
    "glob": None,
}
"""Functions of the standard library that take a path or start a program; None: all of a module."""

NO_PATH = {"os.path.samestat"}

METHODS = {
    *("chmod", "create_unix_connection", "create_unix_server", "exists", "expanduser", "glob"),
    *("group", "hardlink_to", "is_block_device", "is_char_device", "is_dir"),
    *("is_fifo", "is_file", "is_junction", "is_mount", "is_socket", "is_symlink", "iterdir"),
    *("lchmod", "lstat", "mkdir", "open", "owner", "read_bytes", "read_text", "readlink", "rename"),
    *("resolve", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch", "unlink", "walk"),
    *("write_bytes", "write_text", "bind", "connect", "connect_ex", "sendto", "sock_connect"),
    *("subprocess_exec", "subprocess_shell"),
}
"""Methods of `Path`, folder entries, sockets, event loops and libc."""

FUNCTIONS = {"open_untrusted", "write_anew", "start_spared", "ask_spared", "find_program"}
"""The agent's own functions that use a path of their caller with their caller's rights."""


REASONS: dict[str, tuple[str, ...]] = {
    "it is of the kernel's: /proc, /sys or /dev/null, by numbers and names that no job gives": (
        "agent.__main__._set_up: os.open",
        "runner_adoption._boot_id: _BOOT_ID.read_text",
        "runner_adoption.RunnerRecords._started_at: "
        "(self._proc / 'sys' / 'kernel' / 'random' / 'boot_id').read_text",
        "runner_adoption.RunnerRecords._started_at: (self._proc / str(pid) / 'stat').read_bytes",
        "hang_watch._switches: Path(f'/proc/{pid}/status').read_text",
        "standby_workers.used_by: Path(f'/proc/{pid}/smaps_rollup').read_text",
        "standby_workers.used_by: Path(f'/proc/{pid}/stat').read_text",
        "numa._Machine._text: (self.sysfs / path).read_text",
        "numa._Machine.core_complex_of: (self.sysfs / f'devices/system/cpu/cpu{cpu}/cache').glob",
        "numa._Machine.nodes: (self.sysfs / 'devices/system/node').glob",
        "numa._gpus_on_pci: (sysfs / 'bus/pci/devices').glob",
        "numa._text_or_nothing: path.read_text",
        "resources.memory_cgroups: (top / 'cgroup.controllers').exists",
        "exit_messages._describe_shm: os.statvfs",
        "memory_kills._link: path.readlink",
        "system._of_cgroups: (cgroup / 'cgroup.controllers').exists",
        "system._read: path.read_text",
        "resources.read_text: path.read_text",
        "warm_forks.Fork.send_program: os.open",
        "processes.OwnChildren.__init__: os.open",
        "processes._stat_of: Path(f'/proc/{pid}/stat').read_bytes",
        "processes.runs_program: os.path.basename",
        "processes.runs_program: os.readlink",
        "processes.mark_of: Path(f'/proc/{pid}/limits').read_bytes",
        "processes._socket_inodes: os.listdir",
        "processes._socket_inodes: Path(f'/proc/{pid}/fd/{fd}').readlink",
        "processes._live: Path(f'/proc/{pid}/net/{table}').read_bytes",
        "processes._live: Path(f'/proc/{pid}').exists",
        "spawn._prepare_child: os.listdir",
        "spawn.drop_oom_protection: score.read_bytes",
        "spawn.drop_oom_protection: score.write_bytes",
        "processes.children_of: Path(f'/proc/{pid}/task/{task}/children').read_bytes",
        "processes.children_of: os.listdir",
        "zygote_process.ZygoteProcess.hurry: Path(f'/proc/{self._zygote[0].pid}/autogroup')"
        ".write_text",
        "runner.main: Path(f'/proc/self/task/{os.getpid()}/children').exists",
        "stack_sampling._kernel: Path(f'/proc/{pid}/stack').read_text",
        "stack_sampling._kernel: Path(f'/proc/{pid}/wchan').read_text",
        "stack_sampling._ptrace_scope: PTRACE_SCOPE.read_text",
        "stack_sampling._why_not: os.stat",
        "stack_sampling.process_state: Path(f'/proc/{pid}/stat').read_text",
        "leaked_processes._kill_marked: os.listdir",
        "console_tee._own_console: os.open",
        "xid.Lifted._boot: self._boot_id.read_text",
        "xid.read_records: os.open",
    ),
    "it lies in a directory of the agent's own, which `check_own` has seen to": (
        "accounts.identity_of_owner: path.lstat",
        "runner_adoption.RunnerAdoption._found: self._sockets.iterdir",
        "runner_adoption.RunnerAdoption._read: self._file.read_bytes",
        "runner_adoption.RunnerAdoption._write: os.open",
        "runner_adoption.RunnerAdoption._write: temporary.replace",
        "runner_adoption.RunnerAdoption.adopt_runners: self._sockets.mkdir",
        "runner_adoption._remove: path.unlink",
        "daemon._own_directories: path.mkdir",
        "daemon._remove_leftovers: runtime_dir.glob",
        "daemon.locked: open_untrusted",
        "runner_adoption.RunnerRecords._former: self._folder.iterdir",
        "runner_adoption.RunnerRecords._is_it: path.read_text",
        "runner_adoption.RunnerRecords.forget: (self._folder / str(pid)).unlink",
        "runner_adoption.RunnerRecords.note: (self._folder / str(pid)).write_text",
        "runner_adoption.RunnerRecords.note: self._folder.mkdir",
        "run_folders.RunFolders._make_for: folder.chmod",
        "run_folders.RunFolders._make_for: path.lstat",
        "run_folders.RunFolders._make_for: path.mkdir",
        "run_folders.RunFolders._remove: RunFolder(path).index.unlink",
        "run_folders.RunFolders._remove: path.parent.rmdir",
        "run_folders.RunFolders._remove: path.rename",
        "run_folders.RunFolders.open: path.mkdir",
        "run_folders.RunFolders.open: path.parent.mkdir",
        "run_folders.RunFolders.release: folder.index.exists",
        "run_folders.RunFolders.release: path.rmdir",
        "run_folders._append: os.open",
        "run_folders._append: os.open",
        "run_folders._append: shorter.replace",
        "run_folders._end_of: index.open",
        "run_folders._folders_of: entry.is_dir",
        "run_folders._folders_of: os.scandir",
        "agent_link.AgentLink.close: self._path.unlink",
        "descriptors.listen_at: listener.bind",
        "descriptors.short_path: os.open",
        "found_runner._connect: asyncio.get_running_loop().sock_connect",
        "folder_trees._Place.__enter__: os.open",
        "xid.Lifted.lift: temporary.replace",
        "xid.Lifted.lift: temporary.write_text",
        "xid.Lifted.number: self._file.read_text",
    ),
    "it was made this moment in a directory of the agent's own, and is then given away": (
        "progress_files.ProgressFiles.open_round: os.chown",
        "run_folders.RunFolders._make_for: os.chown",
        "temporary_folders._lock_new: os.open",
        "temporary_folders._lock_new: path.exists",
        "temporary_folders.make: tempfile.mkdtemp",
    ),
    "whoever configures the agent, or starts rdzvrun, has named it": (
        "agent_config._check_passable: os.path.lexists",
        "agent_config._check_passable: place.stat",
        "agent_settings._check_python: shutil.which",
        "agent_settings._folder: Path(os.environ.get(of_user) or else_).expanduser",
        "agent_config.check_directories: os.path.lexists",
        "agent_config.check_directories: tempfile.TemporaryFile",
        "backends._can_bind: probe.bind",
        "agent_config.check_own: Path('/').lstat",
        "agent_config.check_own: os.path.lexists",
        "agent_config.check_own: path.resolve",
        "agent_config.check_own: place.lstat",
        "agent_config.check_own: place.parent.stat",
        "error_files.write_error: path.parent.mkdir",
        "error_files.write_error: path.write_text",
        "health_checks.Command.look: find_program",
        "health_checks.run_in_session: start_spared",
        "health_checks.Disk.look: os.statvfs",
        "preemption._read: os.open",
        "preemption._run: find_program",
        "stack_sampling.find_py_spy: os.access",
        "stack_sampling.find_py_spy: shutil.which",
    ),
    "only rdzvrun does so, in folders of its own account, which runs its workers too": (
        "options._count: ask_count_devices(), which is not told whose",
        "temporary_folders._remove_if_left: os.open",
        "temporary_folders._remove_if_left: remove_tree(), which is not told whose",
        "temporary_folders.has_files: os.walk",
        "temporary_folders.sweep: os.scandir",
        "temporary_folders.sweep: tempfile.gettempdir",
    ),
    "only what has a console is teed: `Output.console` is false for submitted jobs": (
        "console_tee.Tee.duplicate: os.open",
        "tailed_file.TailedFile.copy_some: os.open",
    ),
    "it is in the child that becomes a program, which `_prepare_child` has made the account": (
        "spawn._become_program: os.chdir",
        "spawn._become_program: os.stat",
        "spawn._execute: Path(program.argv[0]).exists",
        "spawn._execute: Path(program.argv[0]).open",
        "spawn._execute: os.execvpe",
        "spawn._open_log: Path(path).parent.mkdir",
        "spawn._open_log: os.open",
        "spawn._open_streams: os.open",
        "spawn._open_streams: os.open",
        "warm_forks.Fork.send_order: os.open",
    ),
    "the runner stays root, so that no job can end or escape it": (
        "runner_link._start_runner: subprocess.Popen",
    ),
    "it runs nothing but this interpreter, which then ends": (
        "descriptors._close_elsewhere: os.posix_spawn",
    ),
    "its caller acts as the account": (
        "accounts.open_untrusted: os.open",
        "accounts.write_anew: open_untrusted",
        "agent_children.ask_spared: start_spared",
        "agent_children.start_spared: asyncio.create_subprocess_exec",
        "side_thread.find_program: Path(name).exists",
        "side_thread.find_program: shutil.which",
        "snapshot_file_watch.look: entry.stat",
        "snapshot_file_watch.look: os.scandir",
        "snapshot_file_watch.look: path.stat",
        "folder_trees._Level.__init__: os.scandir",
    ),
    "it has this name, and opens no file itself": (
        "job_driver.JobDriver.get_ready: self.event_log.open",
        "job_driver.JobDriver.prepare: self.event_log.open",
        "worker_group.LocalWorkerGroup.prepare: self._logs_specs.open",
    ),
    "an abstract address is no file": (
        "torch_watch._Watch._report: sender.sendto",
        "zygote_process.WarmRestarts._listen: self._socket.bind",
    ),
    "py-spy is the worker's account, unless the kernel lets only root trace it "
    "(kernel.yama.ptrace_scope); docs/run-as.md says so": ("stack_sampling._run: ask_spared",),
}
"""Why these need not be done as an account."""


@dataclass
class Use:
    """One operation on a path, or one use of a private function."""

    what: str
    where: str
    guarded: bool
    called: bool = True


@dataclass
class Module:
    """What one module does with paths."""

    name: str
    paths: list[Use] = field(default_factory=list)
    uses: dict[str, list[Use]] = field(default_factory=dict)
    """Its private functions, by name."""
    private: set[str] = field(default_factory=set)

    def unguarded(self) -> Iterator[str]:
        """Return the operations that are not done as an account."""
        safe: set[str] = set()
        while True:
            more = {name for name in self.private - safe if self._all_guarded(name, safe)}
            if not more:
                break
            safe |= more
        for use in self.paths:
            if not (use.guarded or last(use.where) in safe):
                yield f"{self.name}.{use.where}: {use.what}"

    def _all_guarded(self, name: str, safe: set[str]) -> bool:
        uses = self.uses.get(name, [])
        return bool(uses) and all(
            use.called and (use.guarded or last(use.where) in safe) for use in uses
        )


def last(where: str) -> str:
    return where.rpartition(".")[2]


class Finder(ast.NodeVisitor):
    """Visits one module."""

    def __init__(self, module: Module, takes: Collection[str]) -> None:
        self.module = module
        self.takes = takes
        self.where: list[str] = []
        self.guarded = False
        self.called: set[ast.expr] = set()

    # ------------------------------------------------------------------ where it is

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.where.append(node.name)
        self.generic_visit(node)
        self.where.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        # Its body runs when it is called, which may be elsewhere.
        outer, self.guarded = self.guarded, False
        self.where.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.where.pop()
        self.guarded = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        outer, self.guarded = self.guarded, False
        self.generic_visit(node)
        self.guarded = outer

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        outer = self.guarded
        for item in node.items:
            self.visit(item)
            self.guarded = self.guarded or is_guard(item.context_expr)
        for statement in node.body:
            self.visit(statement)
        self.guarded = outer

    visit_AsyncWith = visit_With  # noqa: N815

    # ------------------------------------------------------------------ what it does

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if is_of_module(f"{node.module}.{alias.name}"):
                self._found(f"from {node.module} import {alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        self.called.add(node.func)
        name = last(written(node.func))
        if name in FUNCTIONS or (isinstance(node.func, ast.Name) and name == "open"):
            self._found(name)
        elif isinstance(node.func, ast.Attribute) and not is_of_module(written(node.func)):
            is_path_replace = name == "replace" and len(node.args) == 1 and not node.keywords
            if name in METHODS or is_path_replace:
                self._found(written(node.func))
        if name in self.takes and not says_whose(node):
            self._found(f"{name}(), which is not told whose")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text = written(node)
        if is_of_module(text) and text not in ("os.path", *NO_PATH):
            self._found(text)
        if text.startswith("Path.") and node.attr in METHODS and node not in self.called:
            self._found(text)
        self._use(node.attr, node)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            if node.id in FUNCTIONS and node not in self.called:
                self._found(node.id)
            self._use(node.id, node)

    def _found(self, what: str) -> None:
        self.module.paths.append(Use(what, ".".join(self.where), self.guarded))

    def _use(self, name: str, node: ast.expr) -> None:
        if name in self.module.private:
            use = Use(name, ".".join(self.where), self.guarded, node in self.called)
            self.module.uses.setdefault(name, []).append(use)


def is_of_module(text: str) -> bool:
    module, _, name = text.partition(".")
    known = MODULES.get(module, set())
    return bool(name) and (known is None or name.partition(".")[0] in known)


def is_guard(expression: ast.expr) -> bool:
    if not (isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name)):
        return False
    as_whom = expression.args[:1]
    return expression.func.id in GUARDS and not any(
        isinstance(one, ast.Constant) for one in as_whom
    )


def says_whose(node: ast.Call) -> bool:
    """Whether a call passes on an identity or an account."""
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    words = {word for one in given for word in last_words(one)}
    return bool(words & WHOSE) or any(keyword.arg is None for keyword in node.keywords)


def last_words(expression: ast.expr) -> Iterator[str]:
    """Yield the names in an expression: `self._identity` is "identity"."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            yield name.removeprefix("_").partition("_")[0]


def sources() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(AGENT.rglob("*.py")):
        of_package = path.stem.startswith("__")
        name = f"{path.parent.name}.{path.stem}" if of_package else path.stem
        if path.stem not in OF_THE_JOB:
            assert name not in found, f"two files are called {name}"
            found[name] = path.read_text()
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def unguarded(texts: dict[str, str] | None = None) -> Counter[str]:
    """Count the operations not done as an account, by place and kind."""
    texts = texts or sources()
    takes = {name: who_take(text) for name, text in texts.items()}
    public = {name for names in takes.values() for name in names if not name.startswith("_")}
    found: Counter[str] = Counter()
    for name, text in texts.items():
        found.update(unguarded_in(name, text, (takes[name] | public) - GUARDS))
    return found


@cache
def unguarded_in(name: str, text: str, takes: frozenset[str]) -> tuple[str, ...]:
    tree, module = parsed_text(text), Module(name)
    module.private = {
        function.name for function in functions(tree) if function.name.startswith("_")
    }
    Finder(module, takes).visit(tree)
    return tuple(module.unguarded())


@cache
def who_take(text: str) -> frozenset[str]:
    """Return the functions and classes of a module that act for an account."""
    found = set()
    for node in parsed_text(text).body:
        if isinstance(node, ast.ClassDef):
            if any(method.name == "__init__" and takes_whose(method) for method in functions(node)):
                found.add(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and takes_whose(node):
            found.add(node.name)
    return frozenset(found)


def takes_whose(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = (*function.args.args, *function.args.kwonlyargs)
    # `server_link` has another Identity, a node's.
    return any(
        one.arg in WHOSE and one.annotation is not None and "| None" in written(one.annotation)
        for one in arguments
    )


def written(expression: ast.expr) -> str:
    """Return the text of an expression; most are names with dots, which need no `unparse`."""
    match expression:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value, attr=name):
            return f"{written(value)}.{name}"
    return ast.unparse(expression)


# ---------------------------------------------------------------------- the tests


def test_every_path_is_handled_as_an_account_or_has_a_reason_not_to_be() -> None:
    found, explained = unguarded(), Counter(key for keys in REASONS.values() for key in keys)
    new = [f"{key} (x{found[key]})" for key in found if found[key] > explained[key]]
    assert not new, (
        "done with root's rights where jobs have accounts of their own; do it inside of "
        f"acting_as or started_as, or write down in REASONS why no job has a say in it: {new}"
    )
    gone = [key for key in explained if explained[key] > found[key]]
    assert not gone, f"these stand in REASONS, and are done as an account or not at all: {gone}"


PROGRESS = "progress_files"
PLACE = "    def say_again(self)"


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ("open(self._folder)", "open"),
        ("os.stat(self._folder)", "os.stat"),
        ("os.path.exists(self._folder)", "os.path.exists"),
        ("self._folder.unlink()", "self._folder.unlink"),
        ("self._folder.replace(other)", "self._folder.replace"),
        ("shutil.rmtree(self._folder)", "shutil.rmtree"),
        ("subprocess.run(['ls', self._folder])", "subprocess.run"),
        ("in_thread(os.unlink, self._folder)", "os.unlink"),
        ("map(Path.exists, self._paths)", "Path.exists"),
        ("remove_tree(self._folder)", "remove_tree(), which is not told whose"),
        ("from os import unlink", "from os import unlink"),
        ("with acting_as(None): os.stat(self._folder)", "os.stat"),
        ("with open(self._folder), acting_as(self._identity): pass", "open"),
        ("with acting_as(self._identity): return lambda: os.stat(self._folder)", "os.stat"),
        ("_content(self._folder)", None),
    ],
)
def test_a_path_that_is_added_without_an_account_is_found(added: str, found: str | None) -> None:
    texts = sources()
    assert texts[PROGRESS].count(PLACE) == 1
    line = f"    def added(self):\n        {added}\n\n{PLACE}"
    texts[PROGRESS] = texts[PROGRESS].replace(PLACE, line)
    more = unguarded(texts) - unguarded()
    if found is None:
        # One more use has only root's rights, so the function's own operations are found now.
        assert set(more) == {"progress_files._content: open_untrusted"}
    else:
        assert set(more) == {f"progress_files.ProgressFiles.added: {found}"}


@pytest.mark.parametrize(
    "added",
    [
        "with acting_as(self._identity): os.stat(self._folder)",
        "with acting_as(self._identity), open(self._folder): pass",
        "with started_as(self._account) as how: subprocess.run(['ls'], **how)",
        "remove_tree(self._folder, self._identity)",
        "with acting_as(self._identity): _content(self._folder)",
        "self._text.replace('a', 'b')",
    ],
)
def test_a_path_that_is_added_with_an_account_is_none_of_them(added: str) -> None:
    texts = sources()
    line = f"    def added(self):\n        {added}\n\n{PLACE}"
    texts[PROGRESS] = texts[PROGRESS].replace(PLACE, line)
    assert unguarded(texts) == unguarded()
