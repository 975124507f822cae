#!/bin/bash
# `recourse ARGUMENTS` in a driver's container, or a part of a Spark cluster: `executor`, as Spark's scheduler for
# Kubernetes calls it, `master`, or `worker URL` of a standalone cluster.
set -eu

case "${1:-}" in executor | master | worker) ;; *) exec recourse "$@" ;; esac

SPARK_HOME=$(python3 -c 'import importlib.util as u; print(u.find_spec("pyspark").submodule_search_locations[0])')
export SPARK_HOME SPARK_SCALA_VERSION=2.13
class_path="${SPARK_CONF_DIR:+$SPARK_CONF_DIR:}${HADOOP_CONF_DIR:+$HADOOP_CONF_DIR:}$SPARK_HOME/jars/*"
class_path="$class_path${SPARK_CLASSPATH:+:$SPARK_CLASSPATH}${SPARK_EXTRA_CLASSPATH:+:$SPARK_EXTRA_CLASSPATH}"

case "$1" in
    master)
        exec "$JAVA_HOME/bin/java" -cp "$class_path" org.apache.spark.deploy.master.Master --host "$(hostname)" --port 7077
        ;;
    worker)
        exec "$JAVA_HOME/bin/java" -cp "$class_path" org.apache.spark.deploy.worker.Worker --work-dir /tmp/spark "$2"
        ;;
esac

# Spark passes the executor's Java options as SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 ...
options=()
while IFS= read -r name; do
    options+=("${!name}")
done < <(compgen -e SPARK_JAVA_OPT_ | sort -t_ -k4 -n)
exec "$JAVA_HOME/bin/java" "${options[@]}" -Xms"$SPARK_EXECUTOR_MEMORY" -Xmx"$SPARK_EXECUTOR_MEMORY" -cp "$class_path" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
