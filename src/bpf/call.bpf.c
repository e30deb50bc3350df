// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The calls of one function by an fentry and an fexit program.
 *
 * The key is the call's trampoline frame. An fentry and an fexit program on one
 * function run in one trampoline invocation and get the same context pointer,
 * an address on that call's own stack: unique among all calls in flight,
 * whatever the task, the CPU, or the depth of nesting.
 *
 * Only the call that owns a key ever touches the slot that holds it. What CPUs
 * contend for is the claim of a free slot, so the claim alone is a
 * compare-and-swap.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include "call.bpf.h"

/*
 * A value that is the same at both ends of a call, and mostly another in another
 * call: what it works on. Where an exit and then a start were skipped by the
 * kernel's recursion guard, the stale start is recognised by it. Mostly: a thread
 * may well call the function with the same argument again, see is_certain().
 */
static __always_inline __u64 fingerprint(const __u64 *ctx)
{
	return scalar(ctx_word(ctx, fingerprint_word));
}

/*
 * Which task it is, and how often it has been switched out: what stays the same
 * over a call was on its CPU all the time. Where the task can't be told, the latter alone.
 */
static __always_inline __u64 stint(const struct task_struct *task)
{
	if (!task)
		return switches_so_far();
	/* Its number as well: the next task may get the place, the stack and the counts of one that has died. */
	return scalar((__u64)task) + ((__u64)task->pid << 32) + task->nvcsw + task->nivcsw;
}

/*
 * Which of two kinds a start is, is told by its fingerprint, so that the exit that
 * looks for one of the kind takes no extra step: of a careful one it is inverted.
 */
static __always_inline __u64 careful(__u64 fingerprint)
{
	return ~fingerprint;
}

static __always_inline struct run run_of(const __u64 *ctx, const struct task_struct *task)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return (struct run){
		.ctx = ctx,
		.task = task,
		.key = key_of_frame(ctx),
		.fingerprint = careful(fingerprint(ctx)),
		.stint = stint(task),
		.counters = counters_of(cpu),
		.cpu = cpu,
	};
}

/*
 * Whether the frame is on the task's own stack, not on the CPU's interrupt
 * stack. Stacks are larger on some kernels, which only means less certainty.
 */
static __always_inline int is_on_own_stack(const struct run *run)
{
	const __u64 smallest_stack = 16384;

	return address((__u64)run->ctx) - address((__u64)run->task->stack) < smallest_stack;
}

/*
 * Whether the start can only be this call's own.
 *
 * A stale start can be taken for it only where this call's entry was skipped,
 * and that happens only if something was stopped inside the entry program on
 * this CPU: another task, which was preempted there, or this one, on top of
 * which we run in an interrupt. A stale start of the other case was left by
 * this task before the preemption, so it has been switched out since. And in an
 * interrupt the frame is on another stack.
 *
 * What isn't certain is for user space to decide, by what the kernel skipped.
 */
static __always_inline int is_certain(const struct run *run, const struct dwell_start *start)
{
	/* No kernel that lacks the pointer skips anything. */
	if (!run->task)
		return 1;
	return start->stint == run->stint && is_on_own_stack(run);
}

static __always_inline void finish(const struct run *run, const struct waiting *ended, __u64 now, int has_cmpxchg)
{
	const struct dwell_start *start = &ended->start;
	int is_careful = start->fingerprint == run->fingerprint;

	/* It began before the probe was switched on. */
	if (!start->ns)
		return;
	/*
	 * Another call's start (see fingerprint()), or a clock that went backwards,
	 * which the kernel's fast clock may across an NMI: no latency is better than
	 * a wrong one.
	 */
	if ((!is_careful && careful(start->fingerprint) != run->fingerprint) || now < start->ns)
		count(&run->counters->mismatched);
	else
		complete(run, ended, now, is_careful && is_certain(run, start), has_cmpxchg);
}

/*
 * A start that still holds this very frame lost its exit, as happens to calls
 * in flight when somebody attaches to or detaches from the function: the frame
 * is a new call's now. It is looked for in both stores.
 *
 * A call that comes while the probe is off is noted as well, as one of no time, so
 * that its exit meets neither a stale start nor none.
 */
static __always_inline int enter(const __u64 *ctx)
{
	struct dwell_slot *set, *slot;
	struct subject subject;
	struct waiting stale;
	struct run run;

	run = run_of(ctx, bpf_get_current_task_btf());
	if (state.overflow_live && take_from_hash(&run, &stale))
		overwrite(&run, &stale.start);
	set = set_of_frame(run.key);
	slot = find(set, run.key);
	if (slot)
		overwrite(&run, &slot->start);
	/* A call that isn't wanted must not leave its exit a stale start either. */
	if (!is_wanted(ctx, &subject)) {
		if (slot)
			release(slot);
		return 0;
	}
	if (!slot)
		slot = claim(set, run.key);
	if (!probe_on) {
		if (slot) {
			slot->start.fingerprint = run.fingerprint;
			slot->start.ns = 0;
		} else {
			count(&run.counters->unseen);
		}
		return 0;
	}
	count(&run.counters->started);
	run.group = call_group(ctx);
	if (slot) {
		keep_identity(slot, &subject.waiting.identity);
		fill(&slot->start, &run, skb_len(ctx));
	} else {
		start_in_hash(&run, skb_len(ctx), &subject.waiting.identity);
	}
	return 0;
}

/* An end without a start: its entry was skipped, or found no room. From here on pairs are looked at more closely. */
static __always_inline void skipped_start(const struct run *run)
{
	if (!probe_on)
		return;
	no_start(run);
	if (!is_choosy() && probe_on == DWELL_ON)
		__sync_val_compare_and_swap(&probe_on, DWELL_ON, DWELL_CAREFUL);
}

/* A call that began while the probe was on counts, also when it ends after that. */
static __always_inline int leave(const __u64 *ctx, __u64 now)
{
	struct dwell_slot *slot;
	struct waiting ended;
	struct run run;

	run = run_of(ctx, bpf_get_current_task_btf());
	slot = find(set_of_frame(run.key), run.key);
	if (slot) {
		copy_out(&ended, slot);
		release(slot);
		finish(&run, &ended, now, 1);
	} else if (state.overflow_live && take_from_hash(&run, &ended)) {
		finish(&run, &ended, now, 1);
	} else {
		skipped_start(&run);
	}
	return 0;
}

SEC("fentry")
int call_entry(__u64 *ctx)
{
	return enter(ctx);
}

SEC("fexit")
int call_exit(__u64 *ctx)
{
	return leave(ctx, bpf_ktime_get_ns());
}

/*
 * The same where nothing is asked for that isn't mostly: no condition, no group, no
 * bound on the age, a whole table, and a fingerprint of the first argument, which,
 * if there are events, is the packet. What isn't in .rodata needn't be loaded from
 * there, and a start is mostly in the first place of its set. All else is left to
 * the functions above.
 *
 * A stale start of this very frame further back in the set stays there, and doesn't
 * matter: the exit finds the first. Should this call have gone further back itself,
 * enter() has thrown the other away.
 *
 * Nor is it asked whether each pair is certain, as long as nothing has been skipped:
 * user space believes them all if so. The first exit without a start shows that it
 * isn't so any more, and all calls that begin from then on are left to the above.
 */
FUNCTION int enter_elsewhere(const __u64 *ctx)
{
	return enter(ctx);
}

FUNCTION int leave_elsewhere(const __u64 *ctx, __u64 now)
{
	return leave(ctx, now);
}

static __always_inline int enter_lean(const __u64 *ctx, enum events events)
{
	__u64 key = key_of_frame(ctx);
	struct dwell_slot *slot = whole_set_of_frame(key);

	if (probe_on != DWELL_ON || !take_free(slot, key))
		return enter_elsewhere(ctx);
	slot->starts++;
	slot->start.fingerprint = scalar(ctx[0]);
	if (events != NO_EVENTS)
		note_packet(&slot->start, ctx);
	slot->start.ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int leave_lean(const __u64 *ctx, enum events events)
{
	__u64 now = bpf_ktime_get_ns(), start_ns, latency;
	__u64 key = key_of_frame(ctx);
	struct dwell_slot *slot = whole_set_of_frame(key);

	if (slot->key != key || slot->start.fingerprint != scalar(ctx[0]))
		return leave_elsewhere(ctx, now);
	start_ns = slot->start.ns;
	if (now < start_ns || start_ns < doubtful_before)
		return leave_elsewhere(ctx, now);
	latency = now - start_ns;
	add_to_row(UNCERTAIN, latency, 1);
	emit_lean(ctx, slot, latency, 0, events);
	release(slot);
	return 0;
}

SEC("fentry")
int call_entry_lean(__u64 *ctx)
{
	return enter_lean(ctx, NO_EVENTS);
}

SEC("fexit")
int call_exit_lean(__u64 *ctx)
{
	return leave_lean(ctx, NO_EVENTS);
}

SEC("fentry")
int call_entry_lean_skb(__u64 *ctx)
{
	return enter_lean(ctx, SOME_EVENTS);
}

SEC("fexit")
int call_exit_lean_some(__u64 *ctx)
{
	return leave_lean(ctx, SOME_EVENTS);
}

SEC("fexit")
int call_exit_lean_all(__u64 *ctx)
{
	return leave_lean(ctx, ALL_EVENTS);
}

/*
 * The same for kernels before 5.12, which have neither compare-and-swap nor
 * bpf_get_current_task_btf(), and no recursion guard that could skip a program.
 */
SEC("fentry")
int call_entry_hash(__u64 *ctx)
{
	struct subject subject;
	struct waiting stale;
	struct run run;

	if (!probe_on)
		return 0;
	run = run_of(ctx, 0);
	if (!is_wanted(ctx, &subject)) {
		if (take_from_hash(&run, &stale))
			overwrite(&run, &stale.start);
		return 0;
	}
	count(&run.counters->started);
	run.group = call_group(ctx);
	start_in_hash(&run, skb_len(ctx), &subject.waiting.identity);
	return 0;
}

SEC("fexit")
int call_exit_hash(__u64 *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct waiting ended;
	struct run run;

	if (!probe_on)
		return 0;
	run = run_of(ctx, 0);
	if (take_from_hash(&run, &ended))
		finish(&run, &ended, now, 0);
	else
		no_start(&run);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
