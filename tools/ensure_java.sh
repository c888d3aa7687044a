#!/bin/sh
# Makes sure that a Java 17 or newer is there, for Spark and for Kafka: nothing to do where it is, installed by apt
# where this runs as root, else the one command is printed and this fails.
set -u

version_of() {
    "$1" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]\{1,\}\).*/\2/p' | head -n 1
}

found=""
# Spark takes JAVA_HOME where it is set, so a good Java on PATH does not help then.
if [ -n "${JAVA_HOME:-}" ]; then
    java="$JAVA_HOME/bin/java"
else
    java=$(command -v java || true)
fi
if [ -n "$java" ] && [ -x "$java" ]; then
    version=$(version_of "$java")
    if [ -n "$version" ] && [ "$version" -ge 17 ]; then
        echo "Java $version: $java"
        exit 0
    fi
    found=" $java (Java ${version:-of unknown version})"
fi

if [ -n "${JAVA_HOME:-}" ]; then
    echo "error: JAVA_HOME is $JAVA_HOME, and Spark and Kafka need Java 17 or newer there; found:${found:- none}." >&2
    echo "Unset JAVA_HOME, or point it at a newer one." >&2
    exit 1
fi

if command -v apt-get >/dev/null; then
    install="apt-get install -y openjdk-17-jre-headless"
    if [ "$(id -u)" = 0 ]; then
        if [ "${KAFKA_CHUNKED_INSTALL:-yes}" = no ]; then
            echo "error: Java 17 or newer is missing (found:${found:- none}); KAFKA_CHUNKED_INSTALL=no forbids to install it. As root:" >&2
            echo "    $install" >&2
            exit 1
        fi
        echo "Java 17 is missing (found:${found:- none}); installing a headless one with apt for the whole system."
        echo "To refuse, stop this (Ctrl-C) and set KAFKA_CHUNKED_INSTALL=no."
        if [ -t 0 ]; then sleep 5; fi
        apt-get update -qq || echo "warning: apt-get update failed; trying with the lists at hand" >&2
        # Debian 13 has no 17; what is the default there is newer.
        for package in openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless; do
            if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null; then
                version=$(version_of java)
                if [ -n "$version" ] && [ "$version" -ge 17 ]; then
                    echo "Java $version installed."
                    exit 0
                fi
            fi
        done
        echo "error: apt installed no Java 17 or newer; install one and try again." >&2
        exit 1
    fi
    command="sudo $install"
elif command -v dnf >/dev/null; then
    command="sudo dnf install -y java-17-openjdk-headless"
elif command -v yum >/dev/null; then
    command="sudo yum install -y java-17-openjdk-headless"
elif command -v apk >/dev/null; then
    command="sudo apk add openjdk17-jre-headless"
elif command -v pacman >/dev/null; then
    command="sudo pacman -S --noconfirm jre17-openjdk-headless"
elif command -v zypper >/dev/null; then
    command="sudo zypper install -y java-17-openjdk-headless"
else
    command="(install a Java 17 runtime and set JAVA_HOME to it)"
fi
echo "error: Spark and Kafka need Java 17 or newer; found:${found:- none}. Install it with:" >&2
echo "    $command" >&2
exit 1
