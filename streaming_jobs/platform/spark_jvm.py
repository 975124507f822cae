"""The JVM of a Spark session: our own command line to SparkSubmit, without Spark's launcher.

`bin/spark-submit` first starts a JVM that prints the command line of the second one. That takes half a second, asks for
the module `jdk.incubator.vector`, which not every Java has (MLlib alone uses it), and puts every property of the
session on the command line, where any user of the machine can read it. Here the options are those that the launcher
(org.apache.spark.launcher.SparkSubmitCommandBuilder) would have given, without that module; options and properties
are in two files of mode 0600, which are removed once the JVM answers.

The JVM's side is PySpark's own: PythonGatewayServer writes its port and its secret to a file, and ends when its
standard input does, so it ends with the process that started it. `conf/spark-env.sh` is not read.
"""

from __future__ import annotations

import os
import pkgutil
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import structlog

from streaming_jobs.errors import ConfigurationError, TransientError
from streaming_jobs.platform.java import Java, as_properties
from streaming_jobs.platform.processes.acknowledgements import acknowledge_at_once
from streaming_jobs.platform.processes.child import ended_by
from streaming_jobs.storage.files import write_atomic
from streaming_jobs.text import commands

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Java of our own in a session's JVM, for what would take a call over the gateway for each of many small steps.
#
# It is compiled by Janino, with which Spark compiles its queries: Java without lambdas and without checks of type
# parameters, in milliseconds.


def new_object(session: SparkSession, name: str, source: str) -> Any:
    """An object of the public class `recourse.<name>`: `source` is its file, with a constructor without arguments.

    A JVM compiles it once: Py4J remembers methods by the name of their class, and would call those of another class of
    the same name. Raises Py4JError if the JVM does not compile it.
    """
    jvm, gateway = session._jvm, session.sparkContext._gateway
    assert jvm is not None and gateway is not None
    with _COMPILING:  # the first batches of a session's streams come at the same time
        compiled = _COMPILED.setdefault(gateway, {})
        if name not in compiled:
            compiled[name] = _constructor(jvm, name, source)
    return compiled[name].newInstance(gateway.new_array(jvm.java.lang.Object, 0))


_TYPE_CHECKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What checks the type of a Java object, by the gateway to its JVM."""


def check_types_by_one_call() -> None:
    """Py4J looks for its function in three calls each time that it calls it.

    PySpark asks for up to fifteen classes of an exception, several times over: 50 ms of a batch that fails.
    """
    from py4j import java_gateway  # type: ignore[import-untyped]

    as_before = java_gateway.is_instance_of
    if as_before.__module__ != java_gateway.__name__:
        return

    def is_instance_of(gateway: Any, java_object: Any, java_class: Any) -> bool:
        if not isinstance(java_class, str):
            return bool(as_before(gateway, java_object, java_class))
        if (checks := _TYPE_CHECKS.get(gateway)) is None:
            checks = _TYPE_CHECKS[gateway] = gateway.jvm.py4j.reflection.TypeUtil.isInstanceOf
        return bool(checks(java_class, java_object))

    java_gateway.is_instance_of = is_instance_of


class PromptStream:
    """What Py4J reads of the JVM, such as the stack trace of an exception, acknowledged as soon as it arrives."""

    def __init__(self, stream: Any, connected: socket.socket) -> None:
        self._stream = stream
        self._connected = connected

    def readline(self) -> bytes:
        acknowledge_at_once(self._connected)
        return bytes(self._stream.readline())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def read_promptly() -> None:
    """Have all connections that Py4J makes from now on read by a `PromptStream`."""
    from py4j.clientserver import ClientServerConnection  # type: ignore[import-untyped]

    if hasattr(ClientServerConnection, "_recourse_prompt"):
        return
    connection: Any = ClientServerConnection
    connection._recourse_prompt = True
    for name in ("connect_to_java_server", "init_socket_from_python_server"):
        setattr(connection, name, _prompt(getattr(connection, name)))


def _prompt(connect: Callable[..., None]) -> Callable[..., None]:
    def connected(self: Any, *options: Any) -> None:
        connect(self, *options)
        self.stream = PromptStream(self.stream, self.socket)

    return connected


_COMPILING = threading.Lock()
_COMPILED: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The constructors of the classes that a JVM, by its gateway, has compiled."""


def _constructor(jvm: Any, name: str, source: str) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(f"package recourse;\n{source}")
    return compiler.getClassLoader().loadClass(f"recourse.{name}").getDeclaredConstructors()[0]


# The heap of a session's JVM: collected when its old objects have doubled, not when it is full.
#
# Java's serial collector collects its old generation only when the generation is full, so the process grows to
# the largest heap allowed, although the objects in use are a small part of that. What gets old and dies in a session
# are mostly broadcasts, maps and plans of batches: 5 MB per second with three busy streams. A full collection takes 0.1
# to 0.3 s.

log = structlog.get_logger()

_COLLECTION = """
public class EarlyCollection implements javax.management.NotificationListener {
    private static final long LEAST = 128L << 20;
    private java.lang.management.MemoryPoolMXBean old = null;

    public EarlyCollection() {
        java.util.Iterator pools = java.lang.management.ManagementFactory.getMemoryPoolMXBeans().iterator();
        while (pools.hasNext()) {
            java.lang.management.MemoryPoolMXBean pool = (java.lang.management.MemoryPoolMXBean) pools.next();
            if (pool.getName().equals("Tenured Gen")) {
                old = pool;
            }
        }
        if (old != null) {
            Object memory = java.lang.management.ManagementFactory.getMemoryMXBean();
            ((javax.management.NotificationEmitter) memory).addNotificationListener(this, null, null);
            expect(0L);
        }
    }

    public void handleNotification(javax.management.Notification notification, Object handback) {
        if (old.isUsageThresholdExceeded()) { // every other notification of the memory bean comes here too
            System.gc();
            expect(old.getUsage().getUsed());
        }
    }

    private void expect(long used) {
        old.setUsageThreshold(Math.min(Math.max(LEAST, 2L * used), old.getUsage().getMax()));
    }
}
"""


def collect_early(session: SparkSession) -> None:
    """Collect the old generation at 128 MB, or at twice the size after the last collection.

    Only the serial collector needs it, which is ours; a user's own choice of another one is left alone.
    """
    try:
        new_object(session, "EarlyCollection", _COLLECTION)
    except Exception as error:  # noqa: BLE001 - only memory is lost
        log.warning("the heap of the JVM grows until it is full", reason=str(error)[:300])


CLASS_PATH = "spark.driver.extraClassPath"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
FURTHER_CLASS_PATH = "SPARK_DIST_CLASSPATH"
"""The variable whose jars come last in the class path."""
_LIBRARY_PATH = "spark.driver.extraLibraryPath"
_MEMORY = "spark.driver.memory"
_MAIN = "org.apache.spark.deploy.SparkSubmit"
_ANSWER = "answer"
_POLL = 0.01
_KILLED = 5.0
LATER_SECOND_COMPILER = (
    "-XX:Tier4InvocationThreshold=40000 -XX:Tier4MinInvocationThreshold=4800 -XX:Tier4CompileThreshold=120000 "
    "-XX:Tier4BackEdgeThreshold=160000"
)
"""Java's second compiler takes methods after 8 times the calls of its defaults, and loops after 4 times the turns.

By default, the compiler is busy for a minute on two cores with code of Spark's driver that runs now and then. The code
that every record passes waits in its queue meanwhile, and a starting session shares the cores with the compiler.
"""

MODULE_OPTIONS = (
    # Java 17 and 21 do not know all of them.
    "-XX:+IgnoreUnrecognizedVMOptions",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.lang.invoke=ALL-UNNAMED",
    "--add-opens=java.base/java.lang.reflect=ALL-UNNAMED",
    "--add-opens=java.base/java.io=ALL-UNNAMED",
    "--add-opens=java.base/java.net=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.util=ALL-UNNAMED",
    "--add-opens=java.base/java.util.concurrent=ALL-UNNAMED",
    "--add-opens=java.base/java.util.concurrent.atomic=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.cs=ALL-UNNAMED",
    "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
    "--add-opens=java.base/sun.util.calendar=ALL-UNNAMED",
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
)
"""org.apache.spark.launcher.JavaModuleOptions of Spark 4.2.0, without `--add-modules=jdk.incubator.vector`."""
_GONE = {"--add-opens=java.base/sun.security.action=ALL-UNNAMED": 24}
"""Options for packages that Java has removed, with the version that did: it would print a warning."""


@dataclass(frozen=True)
class Gateway:
    """A JVM that answers: its process, and the port and secret by which Python talks to it."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str


@dataclass(frozen=True)
class StartingJvm:
    """A JVM that has been started: ask for its `answer`, or `kill` it."""

    process: subprocess.Popen[bytes]
    _folder: tempfile.TemporaryDirectory[str]

    def answer(self) -> Gateway:
        """Wait until it answers; raises TransientError if it ends before."""
        try:
            return Gateway(self.process, *_answer(self.process, Path(self._folder.name) / _ANSWER))
        except BaseException:
            self.kill()
            raise
        finally:
            self._folder.cleanup()

    def kill(self) -> None:
        self.process.kill()
        try:
            self.process.wait(_KILLED)
        finally:
            self._folder.cleanup()


def launch(
    java: Java,
    spark_home: Path,
    properties: Mapping[str, str],
    *,
    keep_open: Sequence[int] = (),
    output: IO[bytes] | None = None,
    scratch: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> StartingJvm:
    """Start the JVM of a session with these Spark properties.

    Options and properties lie in a folder of their own in `scratch` until it answers. It inherits the descriptors
    `keep_open`; `output` receives what it prints, None: where we print.
    Raises ConfigurationError for a heap size among the Java options.
    """
    options = arguments(java, spark_home, properties, environment)
    user_arguments = shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
    temporary = tempfile.TemporaryDirectory(prefix="recourse-jvm-", dir=scratch)
    try:
        folder = Path(temporary.name)
        options_file, properties_file = folder / "java.options", folder / "spark.properties"
        write_atomic(options_file, argument_file(options), durable=False)
        write_atomic(properties_file, as_properties(properties), durable=False)
        # The user's spark-defaults.conf has what is not in our file, as it had beside --conf.
        submit = ["--properties-file", str(properties_file), "--load-spark-defaults", *user_arguments]
        process = subprocess.Popen(
            [str(java.executable), f"@{options_file}", _MAIN, *submit],
            env=_environment(spark_home, properties, environment, folder / _ANSWER),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=tuple(keep_open),
            preexec_fn=_ignore_interrupts,  # noqa: PLW1509 - as PySpark does: Ctrl-C is for us, not for the JVM
        )
    except BaseException:
        temporary.cleanup()
        raise
    return StartingJvm(process, temporary)


def module_options(java: Java) -> list[str]:
    """Those of `MODULE_OPTIONS` that this Java takes without a warning."""
    return [option for option in MODULE_OPTIONS if java.major < _GONE.get(option, java.major + 1)]


def arguments(java: Java, spark_home: Path, properties: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """The JVM's options: class path, heap, the user's, modules. Raises ConfigurationError for a heap size in them."""
    user_options = shlex.split(properties.get(JAVA_OPTIONS, ""))
    if any(option.startswith(("-Xmx", "-XX:MaxHeapSize")) for option in user_options):
        raise ConfigurationError(
            f"{JAVA_OPTIONS} has the size of the heap (-Xmx)",
            "set the heap by spark.driver_memory_mb: RECOURSE_SPARK__DRIVER_MEMORY_MB=2048",
        )
    return [
        "-cp",
        class_path(spark_home, properties, environment),
        *shlex.split(environment.get("SPARK_SUBMIT_OPTS", "")),
        f"-Xmx{properties[_MEMORY]}",
        *shlex.split(properties.get("spark.driver.defaultJavaOptions", "")),
        *user_options,
        *module_options(java),
        "-Dderby.connection.requireAuthentication=false",
    ]


def class_path(spark_home: Path, properties: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """Our jars, Spark's configuration, Spark's jars, then the folders that the environment names."""
    jars = spark_home / "jars"
    # Before the wildcard, whose order is the disk's: the API that all logging bindings are compiled against.
    logging = sorted(jars.glob("slf4j-api-*.jar"))
    named = [environment.get(name, "") for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", FURTHER_CLASS_PATH)]
    conf = environment.get("SPARK_CONF_DIR") or str(spark_home / "conf")
    parts = [properties.get(CLASS_PATH, ""), conf, *map(str, logging), str(jars / "*"), *named]
    return os.pathsep.join(part for part in parts if part)


def argument_file(options: Sequence[str]) -> str:
    """The text of a file that `java @file` reads: each option quoted, for any character in it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
    return "".join(f'"{"".join(escapes.get(c, c) for c in option)}"\n' for option in options)


def _environment(
    spark_home: Path, properties: Mapping[str, str], environment: Mapping[str, str], answer: Path
) -> dict[str, str]:
    """Ours, and what PySpark and its scripts set for the JVM and the Python workers that it starts."""
    libraries = [properties.get(_LIBRARY_PATH, ""), environment.get("LD_LIBRARY_PATH", "")]
    inherited = {name: value for name, value in environment.items() if name != "SPARK_HOME"}
    return {
        **inherited,
        **python_of_workers(spark_home, properties.get("spark.master", ""), environment),
        "SPARK_CONNECT_MODE": "0",
        "PYTHONHASHSEED": environment.get("PYTHONHASHSEED", "0"),
        # A hundred threads would have a part of the memory each.
        "MALLOC_ARENA_MAX": environment.get("MALLOC_ARENA_MAX", "2"),
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(answer),
        **({"LD_LIBRARY_PATH": os.pathsep.join(path for path in libraries if path)} if libraries[0] else {}),
    }


def python_of_workers(spark_home: Path, master: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which Spark finds PySpark for its Python processes.

    With SPARK_HOME, Spark puts the archive `pyspark.zip` before everything else on their path. An archive has no
    compiled modules, so each process would compile them again: a second of CPU time, where the package that we have
    imported takes a third of that. So on this machine there is no SPARK_HOME, only the folder of its configuration.

    Spark also asks a Python process of its own for the data sources of installed packages. Their names begin with
    `pyspark_`; where there is none, it gets no Python to ask.
    """
    if not master.startswith("local") or not (Path(spark_home) / "__init__.py").is_file():
        return {"SPARK_HOME": str(spark_home)}
    found = {"SPARK_CONF_DIR": environment.get("SPARK_CONF_DIR") or str(spark_home / "conf")}
    if not any(module.name.startswith("pyspark_") for module in pkgutil.iter_modules()):
        found["PYSPARK_DRIVER_PYTHON"] = "no-package-has-data-sources"
    return found


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer(process: subprocess.Popen[bytes], file: Path) -> tuple[int, str]:
    """Port and secret, which PythonGatewayServer writes as two big-endian integers of 4 bytes and a text.

    The file appears by a rename, so it is whole.
    """
    while not file.exists():
        if process.poll() is not None:
            raise TransientError(
                f"Spark's JVM ended while it started: {ended_by(process.returncode)}",
                f"its reason is printed above, or in the log of the session; `{commands.doctor()}` checks Java and "
                "jars",
            )
        time.sleep(_POLL)
    data = file.read_bytes()
    length = int.from_bytes(data[4:8])
    return int.from_bytes(data[:4]), data[8 : 8 + length].decode()
