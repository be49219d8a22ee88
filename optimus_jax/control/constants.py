"""Constants of the controller's decisions, by what they decide.

Each has its unit, its source, and what happens if it is too small or too large. The sources:

* Theory: it follows from a model.
* Measured: it was measured, or compared with other values or with none, on the page that is named.
* Reasoned: a guess. No other value was compared.

Code reads `constants.NAME` where the value is used, so a benchmark can set one attribute. Not here:
what a user may set (`ControlConfig` in config/running.py), the first guesses of what a switch costs
(`SwitchCosts` in deciding/switch_costs.py), the priors of the regression (planning/learning/), the
limits of signals (signals.py, sources.py, guard.py, reported_devices.py) and of probes
(baselines.py, mesh_probes.py, probe_rounds.py), how often commands are sent (commands.py), how
exactly a loss must be reproduced (switch.py), and how finely sums approximate integrals (value.py).
"Log" is the natural logarithm.
"""

import math

# When is a change of step times reported? (deciding/changes.py, deciding/step_levels.py,
# deciding/watch.py, deciding/believed_conditions.py, deciding/questions.py, switch_state.py,
# advisor.py)

MIN_LEVEL_SHIFT = math.log(1.1)
"""Smallest change of a level to detect; log step time. Reasoned.
Too small: drifts count as other conditions. Too large: slow links go unnoticed."""
SAME_LEVEL = MIN_LEVEL_SHIFT / 2
"""Two levels that differ by less count as one; log step time. Reasoned: what is no change to
detect, with its error. Too small: drifts count as changes. Too large: other conditions as none."""
CHANGE_LOG_ODDS = 12.0
"""Sum of log-likelihood ratios (CUSUM) at which a change is reported. Reasoned: odds of e^12.
Too small: false alarms. Too large: changes are noticed late."""
MIN_SHIFTED_STEPS = 5
"""Fewest steps in a row that show a change. Reasoned: if a share p of steps are spikes, a false
alarm comes once in p^-5 steps. Too small: spikes are changes. Too large: a later reaction."""
MIN_LEVEL_STEPS = 8
"""Steps after which a level counts as known, and changes can be found. Reasoned.
Too small: false alarms after each switch. Too large: the first decision comes later."""
FEW_STEPS_VARIANCE = 6.0
"""The variance of a step is multiplied by 1 + this / (steps of the level). Reasoned.
Too small: false alarms while level and noise are uncertain. Too large: early changes are missed."""
MAX_LEVEL_ERROR = 1.0
"""Tolerated error of a level, in its standard errors. Reasoned.
Too small: an unlucky level looks like a change. Too large: small changes are noticed later."""
MAX_LEVEL_STEPS = 200
"""Newest steps that a level is estimated from. Reasoned.
Too small: a noisy level. Too large: it follows a drift slowly."""
MIN_STEP_NOISE = 0.01
"""Smallest deviation of log step times that is assumed. Reasoned.
Too small: tiny changes count on steady devices. Too large: changes are noticed later."""
NUM_SKIPPED_STEPS = 2
"""First steps under a plan that are ignored: they fill buffers and caches. Reasoned.
Too small: the level is too high. Too large: it is known later."""
ALARM_LOG_RATIO = math.log(2.0)
"""Log ratio to the usual step time from which one slow step requests a probe. Reasoned.
Too small: probes after every spike. Too large: the cause is looked for some steps later."""
PROBE_SHARE_OF_LOSS = 0.25
"""Share of the time lost to slower steps that probes for the cause may take. Reasoned.
Too small: the cause stays unknown. Too large: probes add to the loss."""
MIN_REGIME_CHANGE = math.log(1.5)
"""Log change of conditions that ends one disturbance and begins another, and of a rejected reading
that makes it count as a new one. Reasoned.
Too small: disturbances seem short. Too large: one seems to last although it has changed."""

# Which readings are believed? (deciding/factors.py, deciding/conditions.py,
# deciding/believed_conditions.py, deciding/step_levels.py, deciding/watch.py,
# deciding/last_seen.py)

MIN_FACTOR, MAX_FACTOR = 0.01, 1e4
"""Range of plausible slowdowns; readings outside it are ignored. Reasoned.
Too narrow: a nearly dead link is not seen. Too wide: broken sensors are read."""
FACTOR_GRID = math.log(1.1)
"""Spacing of the grid that accepted factors are rounded to, as a logarithm. Reasoned.
Too small: evidence of the same conditions is kept apart. Too large: plans are priced wrongly."""
MIN_LINK_CHANGE = math.log(1.25)
"""Log change of a link's factor that counts as other conditions. Reasoned, above the scatter of
readings. Too small: scatter counts. Too large: slow links are not priced."""
MIN_COMPUTE_CHANGE = math.log(1.2)
"""The same for compute. Reasoned.
Too small: noise counts as a slowdown. Too large: slowdowns go unnoticed."""
MIN_PROCESS_CHANGE = math.log(1.12)
"""The same for the time of a process over that of the median process. Reasoned.
Too small: noise makes processes slow. Too large: slow ones go unnoticed."""
MIN_PREDICTED_EFFECT = 0.05
"""Predicted change of log step time that steps can confirm or contradict. Reasoned.
Too small: noise judges readings. Too large: wrong readings are believed unchecked."""
MIN_AGREEMENT_RATIO = 0.35
"""Smallest ratio of observed to predicted change, or of predicted to observed, that confirms a
reading. Reasoned. Too small: any change confirms it. Too large: right readings are rejected."""
NUM_RECENT_STEPS = 5
"""Newest steps that a reading is compared with. Reasoned.
Too small: spikes confirm readings. Too large: true readings are believed later."""
MAX_UNCONFIRMED_STEPS = 12
"""Steps after which a reading that step times contradict is rejected, or a disturbance that they
contradict is over. Reasoned.
Too small: right readings of a slow change are rejected. Too large: frozen ones are believed."""
RECONSIDERED_STEPS = 24
"""Steps after which a rejected reading is compared with step times again, and again. Reasoned: the
level is known well by then. Too small: wrong readings get more chances. Too large: what is believed
by mistake lasts."""
MIN_RECOVERY_EFFECT = 0.15
"""Predicted change of log step time by the end of a disturbance from which step times alone may
show that end. Reasoned. Too small: noise ends it. Too large: frozen sensors are believed."""
FIRST_READING_TOLERANCE = 0.15
"""How much farther, in log step time, steps may be from a factor's first reading than from what is
believed. Measured in decision 30. Too small: what held from the start is rejected. Too large:
errors pass."""
MAX_REVISION_STEPS = 40
"""Steps for which later readings may explain the newest change better. Measured in decision 30
(with and without). Too small: a median of old and new samples is kept. Too large: chance explains
old changes."""
SILENT_AFTER_INTERVALS = 3.0
"""Sensors count as silent after this multiple of their longest interval so far. Measured in
decision 30. Too small: a late reading is an alarm. Too large: frozen sensors are believed
longer."""

# Which steps waited for data? (data_waits.py)

DATA_WAIT_SHARE = 0.05
"""Least share of a step that the wait for its batch takes where the step counts as the loader's.
Reasoned: half of the smallest change of a level. Too small: the loop's own delays hide steps. Too
large: waits look like a slower plan."""
LEAST_DATA_WAIT_S = 0.005
"""Shorter waits do not count, in seconds: the loop itself may need as long to fetch a batch that is
there. Reasoned. Too small: tiny steps count as the loader's. Too large: waits look like a slower
plan."""
NUM_PACE_STEPS, NUM_PACE_OTHERS = 8, 2
"""The loader sets the pace if all of this many newest steps but two waited for their data, and does
not any more if all but two did not. Reasoned. Too few: single long waits hold up decisions. Too
many: the run switches for nothing."""

# What is believed of plans and of durations? (predictor.py, advisor.py, deciding/experience.py,
# deciding/regimes.py, deciding/changes.py, deciding/believed_conditions.py)

MAX_EVIDENCE = 60
"""Measured levels that the regression uses: each plan's first and the newest. Reasoned.
Too small: plans are forgotten. Too large: predicting takes longer (decision 26: 11 to 16 ms)."""
MIN_LEARNT_NOISE = 0.005
"""Smallest deviation of one log step time that is assumed when a level is learnt. Reasoned.
Too small: one plan outweighs all others. Too large: steady levels are not trusted."""
EARLIER_RUN_PLAN_LOG_STD = 0.03
"""Deviation of one plan's log step time from run to run, besides what all plans share. Reasoned
(decision 26). Too small: plans look known. Too large: earlier runs teach nothing."""
TRIED_PLAN_LOG_STD = 0.03
"""Deviation of log step times measured in a few trial steps before the run. Reasoned.
Too small: an unlucky trial rules a plan out. Too large: trials teach nothing."""
MAX_PLAN_DEVIATION = 1.1
"""Logarithm of measured over expected step time beyond which not the plan is the cause, but other
conditions than those believed: three times. Reasoned: plans deviate by tens of percent, a cut link
by a factor of ten. Too small: bad plans teach nothing, and wrong readings are believed. Too large:
a disturbance is taken for a bad plan, or its end is missed."""
MAX_STORED_LEVELS = 30
"""Levels that are relabelled when conditions turn out to have been others, the newest. Reasoned.
Too small: evidence with wrong labels stays. Too large: some work."""
PRIOR_REGIME_STEPS = 5
"""Prior duration of a regime, in steps; it counts like observed time. Reasoned.
Too small: brief disturbances seem over at once. Too large: they seem to last."""
UNKNOWN_DURATION_SHAPE = 0.5
"""Shape of the distribution of durations before any regime has ended. Theory: Jeffreys' prior of a
Poisson rate, Gamma(1/2, 0) (doi:10.1098/rspa.1946.0056). Larger: disturbances seem shorter."""
MAX_PAST_REGIMES = 8
"""Newest past regimes of a kind from which durations are learnt. Reasoned.
Too small: durations stay uncertain. Too large: old ones count for ever."""

# Which plans are considered? (deciding/candidates.py, deciding/options.py,
# deciding/plan_history.py)

NUM_RANKED_PLANS = 12
"""Plans that a search returns. Reasoned.
Too small: the best plan by learnt corrections may be missing. Too large: weighing takes longer."""
MAX_CACHED_SEARCHES = 1000
"""Searches whose results are cached: a few plans each. Reasoned. Too small: conditions that come
back are searched again, up to a second each, and an answer that needs more never comes."""
MAX_CLUSTER_SIZES = 3
"""Device counts to consider when devices cannot be used, the largest. Reasoned.
Too small: a count with a good layout is missed. Too large: more searches."""
MAX_LEFT_OUT_SETS = 3
"""Sets of slow processes to leave out: the slowest, those and the next slowest, and so on.
Measured in decision 30. Too small: a fourth slow host stays in use. Too large: more searches."""
MAX_REBALANCED_PLANS = 8
"""Plans with fewer layers on slow stages, the fastest by the cost model. Reasoned.
Too small: the best by learnt corrections may be missing. Too large: weighing takes longer."""
MAX_PLANS_IN_HISTORY = 8
"""Newest plans of the run, which are always candidates. Reasoned.
Too small: the way back is forgotten. Too large: weighing takes longer."""

# How much memory is there? (deciding/memory_factor.py, deciding/memory_watch.py)

MEMORY_RUN_STD = 0.08
"""Deviation of a run's factor of true over estimated memory before anything was measured. Reasoned.
Too small: what estimates lack is taken for use by something else. Too large: the reverse."""
MEMORY_PLAN_STD = 0.03
"""Deviation of a plan's factor around that of the run. Measured in decision 11: estimates are 2.3%
off on average. Too small: the run's factor follows each plan's error. Too large: it learns
slowly."""
MEMORY_READING_STD = 0.01
"""Deviation of the share in use under one plan; less is no change. Reasoned.
Too small: noise is growth. Too large: growth is seen later."""
MEMORY_UNCHANGED_PROBABILITY = 0.9
"""Prior probability that a new plan finds as much memory taken as the plan before. Reasoned.
Too small: errors of estimates look like use by something else. Too large: the reverse."""
MEMORY_SAFETY_STDS = 1.0
"""Deviations of the error of estimates that a plan has to leave room for, beside the planner's own
margin. Measured in decision 29. Too small: compiled plans are refused. Too large: plans that fit
are not considered."""
MEMORY_LEAD_S = 140.0
"""Seconds for which growing memory has to have room: a switch is prepared meanwhile. Reasoned.
Too small: memory runs out first. Too large: plans are replaced that would have lasted."""
MEMORY_JUMP_SHARE, MEMORY_JUMP_S = 0.1, 20.0
"""More than this share within this many seconds is one large allocation, not growth. Measured in
decision 29. Too small: growth in steps is seen late. Too large: plans are replaced for nothing."""
MIN_MEMORY_GROWTH_S, MAX_MEMORY_GROWTH_S = 60.0, 300.0
"""Seconds over which growth is measured, from where it began. Reasoned.
Too short: noise is growth. Too long: it is seen later."""
MEMORY_CALM_S = 60.0
"""Seconds for which less memory has to be taken before that counts. Reasoned.
Too small: plans return between two peaks. Too large: they return later."""
MEMORY_SHORT_S = 120.0
"""Seconds after the last rise for which memory is not called free; doubled by each shortage.
Reasoned. Too small: plans come and go. Too large: a smaller plan stays longer."""
MEMORY_SETTLING_S = 20.0
"""Seconds after a switch, or a change of batches, until samples describe the new state. Reasoned.
Too small: samples of two plans are compared. Too large: growth is seen later."""
MEMORY_RESERVE_SHARE = 0.03
"""Share to leave free beyond what is taken; less than this counts as nothing. Reasoned.
Too small: a little growth is a shortage. Too large: plans that fit are not considered."""
MAX_TAKEN_SHARE = 0.9
"""Largest share that plans have to do without. Reasoned. Larger: no plan is left."""
MAX_MEMORY_SPREAD = 0.1
"""Spread of a reading beyond which its samples come from two plans. Reasoned.
Too small: growing memory is not read. Too large: medians of two plans are read."""
MAX_MEMORY_SHARE = 1.05
"""Share in use above which a reading is impossible. Reasoned: capacities are known that well.
Too small: full memory is not seen. Too large: a wrong reading makes the run leave its plan."""

# When does a switch pay? (policy.py, deciding/value.py, deciding/account.py)

MIN_PROBABILITY = 0.75
"""Probability that a switch pays, below which it is a gamble; while nobody knows what conditions
are, it is required. Measured in decisions 24 and 26. Too small: runs switch though nothing changes.
Too large: gains are missed."""
MIN_GAMBLE_SHARE = 0.01
"""Least worth of a gamble, as a share of the time that is left. Measured in decision 24.
Too small: switches for nothing. Too large: better plans are missed."""
MIN_GAMBLE_MARGIN = 1 / 3
"""Least worth of a gamble in conditions that may end, as a share of its costs. Measured in
decision 41. Too small: switches for nothing. Too large: better plans are missed."""
MIN_FIRST_GAMBLE_SHARE, FIRST_GAMBLE_PROBABILITY = 0.025, 0.6
"""Least worth of a gamble that is the first switch of a run, as a share of the time that is left,
and least probability that it pays. Measured in decision 24. Too small: runs in which nothing
changes switch. Too large: better plans are missed."""
WAIT_MULTIPLES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Waits to compare with a switch now, as multiples of the sum of the time that conditions have
lasted and their prior duration. Measured in decision 30. Too few: the run switches too early, or
looks again too late."""
REVIEW_AFTER_SHARE = 0.25
"""A switch that does not pay yet is weighed again after this share of the time that conditions have
lasted. Measured in decision 30. Too small: more decisions. Too large: later switches."""
DEBT_REVIEW = 4.0
"""A switch that the account refuses is weighed again after this multiple of the time that is owed:
a plan that saves a quarter has paid by then. Reasoned. Too small: more decisions. Too large: later
switches."""
NEGLIGIBLE_RISK_SHARE = 1e-4
"""Expected loss, as a share of the run, that the account always allows: 0.4 s of an hour. Reasoned.
Too small: rounding refuses sure gains. Too large: debts can grow."""

# How long does the state machine wait, and what ends a trial? (transitions.py, switch_state.py,
# runtime.py, canary.py, deciding/questions.py, deciding/watch.py, deciding/step_levels.py,
# advisor.py, controller.py)

PHASE_LEAD_S = 180.0
"""Seconds before a phase at which its plan is chosen and compiled. Measured in decision 30.
Too small: the run waits for the compiler at the boundary. Too large: it knows less by then."""
MIN_SUSPECT_STEPS = 2
"""Newest steps that have to look different for a switch to wait for an explanation. Reasoned.
Too small: spikes delay switches. Too large: they are made in conditions that have ended."""
NUM_COMPARED_STEPS = 3
"""Newest steps that are compared with earlier ones. Theory: the fewest whose median one outlier
does not move. Too large: older steps may have run in other conditions."""
STEADY_FACTOR = 1.5
"""Step times within this factor of those at the decision count as unchanged, since compiling may
explain it; a plan on trial beyond it is far slower. Measured in decision 30. Too small: switches
wait, and noise ends trials. Too large: some switches are made in other conditions."""
MAX_COMPILE_SLOWDOWN = 1.25
"""Largest factor on step times that is taken out as the effect of compiling. Reasoned.
Too small: compiling looks like a disturbance. Too large: a disturbance goes unnoticed meanwhile."""
MAX_READY_WAIT_STEPS = 20
"""Steps that a plan that is ready waits at most for an explanation of changed steps. Reasoned: a
change is found after five, and twelve more say that a disturbance is over. Too small: switches in
other conditions. Too large: gains come later."""
FORCED_COOLDOWN_TRIALS = 2
"""Cool-down after a switch that the run had to make, as a multiple of `controller.canary_steps`.
Reasoned. Too small: the next switch is decided on unknown step times. Too large: gains come
later."""
NUM_COMPARED_TRIALS = 2
"""Steps before a switch that its trial is compared with, as a multiple of the trial's. Reasoned.
Too small: noise judges. Too large: the steps may have run in other conditions."""
CANARY_NOISE = 2.0
"""Standard errors by which a new plan may look slower by chance. Reasoned: a chance of 2% if noise
is normal. Too small: good plans are taken back. Too large: slower plans are kept."""
MAX_QUARANTINE_DOUBLINGS = 10
"""A plan that failed n times is left alone for 2^n cool-downs; the largest n. Reasoned: 2^10
cool-downs of 30 steps outlast most runs. Too small: a failing plan is tried again and again."""
ADVICE_REPEAT_COOLDOWNS = 10
"""Cool-downs after which advice that nobody follows is given again. Reasoned.
Too small: advice fills the display. Too large: it is overlooked."""

# What does a switch cost? (assembly.py, deciding/switch_costs.py)

COMPILE_TAX_SHARE = 0.1
"""Delay of steps by compiling beside them, over the time of compiling the step alone, where the
compiler has cores of its own. Reasoned.
Too small: the first switch costs more than told. Too large: it is not made."""
PREPARE_COMPILE_RATIO = 2.0
"""Expected time of a preparation, over that of compiling the step alone. Measured on a CPU:
decision 25, 8.2 CPU-seconds over 3.9. Too small: the first switch comes later than it is valued, or
costs more than told. Too large: it is not made."""
MAX_COMPILE_PAUSE = 2.0
"""Longest pause of training for a preparation on shared cores, over the time that it is expected to
take. Reasoned. Too small: the rest is compiled beside steps, which costs more (decision 33). Too
large: where other programs slow the compiler, training stands still for long."""
MOVE_LINK_SHARE = 0.3
"""Share of a link's speed that moving the state reaches. Reasoned.
Too small: switches look dear until one was made. Too large: the first one costs more than told."""
DEFAULT_MOVE_BYTES_PER_S = 1e9
"""Bytes per second of a move over a link of unknown speed. Reasoned.
Too small: moves look dear. Too large: they look cheap."""
CHECKPOINT_BYTES_PER_S = 1e9
"""Bytes per second of a host to and from its disk. Reasoned.
Too small: restarts look dear. Too large: leaving a slow host looks cheap."""
REBALANCED_STATE_SHARE = 0.5
"""Share of the state that moves when neighbouring stages exchange layers. Reasoned.
Too small: rebalancing looks cheap until it was done once."""
PRIOR_COST_WEIGHT = 1.0
"""Weight of the expected costs, as a number of switches: one switch corrects half of the error of
other methods of its kind, and five sixths of its own. Reasoned.
Too small: one slow switch forbids the next. Too large: wrong priors last."""
ALL_METHODS_WEIGHT = 0.5
"""Weight of what all methods of a kind (restarts, or moves in memory) have taught in the cost of
one, as a number of its switches. Reasoned.
Too small: methods learn nothing from each other. Too large: one method's error taxes another."""
LEAST_COST_S = 1e-3
"""Least part of a switch's cost that counts, in seconds, since costs are compared by their
logarithms. Reasoned.
Too small: one part that took no time makes all later ones look free. Too large: it never shows."""
MAX_RECALLED_SWITCHES = 3
"""Switches of each method that later runs take over. Reasoned.
Too small: each run learns anew. Too large: a few of its own do not outweigh them."""
