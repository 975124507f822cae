"""Java of our own in a session's JVM, for what would take a call over the gateway for each of many small steps.

It is compiled by Janino, with which Spark compiles its queries: Java without lambdas and without checks of type
parameters, in milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def new_object(session: SparkSession, name: str, source: str) -> Any:
    """An object of the public class `recourse.<name>`: `source` is its file, with a constructor without arguments.

    Raises Py4JError if the JVM does not compile it.
    """
    jvm, gateway = session._jvm, session.sparkContext._gateway
    assert jvm is not None and gateway is not None
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Thread.currentThread().getContextClassLoader())
    compiler.cook(f"package recourse;\n{source}")
    constructor = compiler.getClassLoader().loadClass(f"recourse.{name}").getDeclaredConstructors()[0]
    return constructor.newInstance(gateway.new_array(jvm.java.lang.Object, 0))
