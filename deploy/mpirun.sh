#!/bin/bash
# Train under Open MPI 4, and start again after a fault.
#
#   RUN_DIR=runs/mine deploy/mpirun.sh -n 16 --hostfile hosts -- --model gpt2-xl --steps 10000    from the root of the repository
#
# What stands before `--` is mpirun's. SIGTERM, SIGUSR1, Ctrl-C and a terminal that is closed mean: save and end, with exit code 75.

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

# What cannot be started at all is the user's mistake; later it is a host that is away for a while.
if ! mpirun "${options[@]}" "${PYTHON:-python}" -c ""; then
    echo "mpirun cannot start ${PYTHON:-python} with these options: ${options[*]}" >&2
    exit 2
fi

# mpirun passes on SIGUSR1 as it is. SIGTERM it follows with SIGKILL a second later, which is no time to save. Under nohup bash leaves HUP ignored.
asked=
trap 'asked=yes; kill -USR1 "$job" 2>/dev/null' INT TERM USR1 HUP

for ((start = 0; start <= ${MAX_RESTARTS:-50}; start++)); do
    [ -n "$asked" ] && exit 75
    echo "start $start: $RUN_DIR"
    # In a session of its own, so that Ctrl-C reaches only this script.
    setsid mpirun "${options[@]}" "${PYTHON:-python}" scripts/train.py "$@" --run-dir "$RUN_DIR" --resume auto &
    job=$!
    [ -n "$asked" ] && kill -USR1 "$job" 2>/dev/null # it came before there was a job to tell
    until wait "$job" || ! kill -0 "$job" 2>/dev/null; do :; done # a signal ends `wait`, not the job
    wait "$job"
    code=$?
    # 0: done. 2: the user's mistake, 76: a run that no longer learns; a restart would only repeat both. All else is worth another start.
    case $code in 0 | 2 | 76) exit $code ;; esac
    [ -n "$asked" ] && exit 75
    echo "exit code $code: starting again in ${RESTART_PAUSE_S:-5} s"
    sleep "${RESTART_PAUSE_S:-5}" # a host that is starting up would use up all restarts in seconds
done
echo "not started again after ${MAX_RESTARTS:-50} restarts"
exit 1
