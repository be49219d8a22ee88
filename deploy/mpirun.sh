#!/bin/bash
# Train under Open MPI 4, and restart after a fault.
#
#   RUN_DIR=runs/mine deploy/mpirun.sh -n 16 --hostfile hosts -- --model gpt2-xl --steps 10000
#
# Run it from the root of the repository. Arguments before `--` are mpirun's. On SIGTERM, SIGUSR1,
# Ctrl-C or a closed terminal the run saves and exits with 75.

usage() {
    echo "usage: RUN_DIR=DIR deploy/mpirun.sh [mpirun options] -- [train.py flags]" >&2
    exit 2
}

options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
[ "$1" = -- ] && [ -n "$RUN_DIR" ] || usage
shift

# A command that cannot be started at all is the user's mistake; later, a host is away for a while.
if ! mpirun "${options[@]}" "${PYTHON:-python}" -c ""; then
    echo "mpirun cannot start ${PYTHON:-python} with these options: ${options[*]}" >&2
    exit 2
fi

# mpirun passes SIGUSR1 on. After SIGTERM it sends SIGKILL a second later, too soon for a save.
# Under nohup, bash keeps ignoring HUP.
asked=
trap 'asked=yes; kill -USR1 "$job" 2>/dev/null' INT TERM USR1 HUP

for ((start = 0; start <= ${MAX_RESTARTS:-50}; start++)); do
    [ -n "$asked" ] && exit 75
    echo "start $start: $RUN_DIR"
    # In a session of its own, so that Ctrl-C reaches only this script.
    setsid mpirun "${options[@]}" \
        "${PYTHON:-python}" scripts/train.py "$@" --run-dir "$RUN_DIR" --resume auto &
    job=$!
    # The signal may have come before there was a job to pass it on to.
    [ -n "$asked" ] && kill -USR1 "$job" 2>/dev/null
    # A signal ends `wait`, not the job.
    until wait "$job" || ! kill -0 "$job" 2>/dev/null; do :; done
    wait "$job"
    code=$?
    # A restart would only repeat 2 (the user's mistake) and 76 (the run no longer learns). Every
    # other code but 0 is worth one.
    case $code in 0 | 2 | 76) exit $code ;; esac
    [ -n "$asked" ] && exit 75
    echo "exit code $code: starting again in ${RESTART_PAUSE_S:-5} s"
    # Without a pause, a host that is still booting would use up all restarts in seconds.
    sleep "${RESTART_PAUSE_S:-5}"
done
echo "not started again after ${MAX_RESTARTS:-50} restarts"
exit 1
