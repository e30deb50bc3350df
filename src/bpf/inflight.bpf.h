/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The in-flight table: the kernel-side store of started, unfinished calls.
 *
 * Its key is the call's trampoline frame. An fentry and an fexit program on one
 * function run in one trampoline invocation and get the same context pointer,
 * an address on that call's own stack: unique among all calls in flight,
 * whatever the task, the CPU, or the depth of nesting.
 *
 * Only the call that owns a key ever touches the slot that holds it. What CPUs
 * contend for is the claim of a free slot, so the claim alone is a
 * compare-and-swap.
 *
 * Two stores: the set-associative array in .bss with a hash map behind it, and,
 * for kernels that lack compare-and-swap (before 5.12), the hash map alone.
 */
#ifndef DWELL_INFLIGHT_H
#define DWELL_INFLIGHT_H

#include "args.bpf.h"
#include "dwell.h"

/* Number of argument words; the return value lies behind them. */
const volatile __u32 arg_words = 0;
/* The word of which the fingerprint is made; >= arg_words: there is none. */
const volatile __u32 fingerprint_word = 0;
/* The number of sets in use, a power of two, less one. */
const volatile __u32 set_mask = DWELL_SETS - 1;

struct dwell_state state = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct dwell_start);
} dwell_overflow SEC(".maps");

/* One run of a program: at one end of one call. */
struct run {
	const __u64 *ctx;
	/* NULL: this kernel has no bpf_get_current_task_btf() (before 5.11). */
	const struct task_struct *task;
	/* User space's tid; 0 on every CPU's idle task. */
	__u32 tid;
	__u64 key;
	struct dwell_counters *counters;
	__u32 cpu;
};

/*
 * The frame's address as a plain number. The verifier lets a privileged
 * program subtract one pointer from another, and calls the result a scalar.
 */
static __always_inline __u64 frame_key(const __u64 *ctx)
{
	__u64 key = (__u64)ctx;

	asm volatile("%0 -= %1" : "+r"(key) : "r"(&state));
	return key;
}

static __always_inline struct run run_of(const __u64 *ctx, const struct task_struct *task)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return (struct run){
		.ctx = ctx,
		.task = task,
		.tid = task ? (__u32)task->pid : (__u32)bpf_get_current_pid_tgid(),
		.key = frame_key(ctx),
		.counters = &state.counters[cpu % DWELL_COUNTER_SETS],
		.cpu = cpu,
	};
}

/*
 * Atomic, because a softirq or a preempting task may run the same program in
 * the middle of the addition. In assembly, because newer clangs make of
 * __sync_fetch_and_add() an instruction that Linux 5.10 lacks, even where its
 * result is unused.
 */
static __always_inline void add(__u64 *to, __s64 value)
{
	asm volatile("lock *(u64 *)(%0 + 0) += %1" : : "r"(to), "r"(value) : "memory");
}

static __always_inline void count(__u64 *counter)
{
	add(counter, 1);
}

/*
 * A value that is the same at both ends of a call, and mostly another in
 * another call: which thread, and what it works on. Where an exit and then a
 * start were skipped by the kernel's recursion guard, the stale start is
 * recognised by it. Mostly: a thread may well call the function with the same
 * argument again, see is_certain().
 */
static __always_inline __u64 fingerprint(const struct run *run)
{
	__u32 argument = 0;

	if (fingerprint_word < arg_words)
		argument = low_half(ctx_word(run->ctx, fingerprint_word));
	return (__u64)run->tid << 32 | argument;
}

/* The set a key belongs to, by Fibonacci hashing: frames differ in few bits. */
static __always_inline struct dwell_slot *set_of(__u64 key)
{
	/* The highest bits are the best mixed; DWELL_SETS is 2^10. */
	__u64 set = (key * 0x9E3779B97F4A7C15ULL) >> 54;

	set &= set_mask;
	/* Not needed with a valid mask; it is what the verifier believes. */
	set &= DWELL_SETS - 1;
	return &state.slots[set * DWELL_WAYS];
}

static __always_inline struct dwell_slot *find(struct dwell_slot *set, __u64 key)
{
#pragma unroll
	for (int way = 0; way < DWELL_WAYS; way++) {
		if (set[way].key == key)
			return &set[way];
	}
	return 0;
}

static __always_inline struct dwell_slot *claim(struct dwell_slot *set, __u64 key)
{
#pragma unroll
	for (int way = 0; way < DWELL_WAYS; way++) {
		if (!set[way].key && !__sync_val_compare_and_swap(&set[way].key, 0, key))
			return &set[way];
	}
	return 0;
}

/*
 * Everything read from the slot must have been read before another CPU can
 * claim it. x86 keeps the order that the compiler left; elsewhere the exchange
 * does.
 */
static __always_inline void release(struct dwell_slot *slot)
{
#ifdef __TARGET_ARCH_x86
	asm volatile("" : : : "memory");
	*(volatile __u64 *)&slot->key = 0;
#else
	(void)__sync_lock_test_and_set(&slot->key, 0);
#endif
}

/*
 * How often a task has been switched out: what stays the same over a call was
 * on its CPU all the time.
 */
static __always_inline __u16 switches(const struct task_struct *task)
{
	return task ? task->nvcsw + task->nivcsw : 0;
}

/*
 * Whether the frame is on the task's own stack, not on the CPU's interrupt
 * stack. Stacks are larger on some kernels, which only means less certainty.
 */
static __always_inline int is_on_own_stack(const struct run *run)
{
	const __u32 smallest_stack = 16384;
	__u32 frame = low_half((__u64)run->ctx);
	__u32 stack = low_half((__u64)run->task->stack);

	return frame - stack < smallest_stack;
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
 * What isn't certain is for the reader to decide, by what the kernel skipped.
 */
static __always_inline int is_certain(const struct run *run, const struct dwell_start *start)
{
	/* No kernel that lacks the pointer skips anything. */
	if (!run->task)
		return 1;
	return start->switches == switches(run->task) && is_on_own_stack(run);
}

/* The time stamp comes last at the start and first at the end. */
static __always_inline void fill(struct dwell_start *start, const struct run *run, __u32 len)
{
	start->fingerprint = fingerprint(run);
	start->len = len;
	start->cpu = run->cpu;
	start->switches = switches(run->task);
	start->ns = bpf_ktime_get_ns();
}

static __always_inline void start_in_hash(const struct run *run, __u32 len)
{
	__u64 key = run->key;
	struct dwell_start empty = {}, *start;
	long exists = bpf_map_update_elem(&dwell_overflow, &key, &empty, BPF_NOEXIST);

	/* Filled in place, so that the map's own cost lies outside the span. */
	start = bpf_map_lookup_elem(&dwell_overflow, &key);
	if (!start) {
		count(&run->counters->untracked);
		return;
	}
	if (exists)
		count(&run->counters->overwritten);
	else
		add(&state.overflow_live, 1);
	fill(start, run, len);
}

static __always_inline int end_in_hash(const struct run *run, struct dwell_start *out)
{
	__u64 key = run->key;
	struct dwell_start *start = bpf_map_lookup_elem(&dwell_overflow, &key);

	if (!start)
		return 0;
	*out = *start;
	if (!bpf_map_delete_elem(&dwell_overflow, &key))
		add(&state.overflow_live, -1);
	return 1;
}

/*
 * A start that still holds this very frame lost its exit, as happens to calls
 * in flight when somebody attaches to or detaches from the function: the frame
 * is a new call's now. It is looked for in both stores.
 */
static __always_inline void start_in_table(const struct run *run, __u32 len)
{
	struct dwell_slot *set = set_of(run->key), *slot;
	__u64 key = run->key;

	if (state.overflow_live && !bpf_map_delete_elem(&dwell_overflow, &key)) {
		add(&state.overflow_live, -1);
		count(&run->counters->overwritten);
	}
	slot = find(set, key);
	if (slot)
		count(&run->counters->overwritten);
	else
		slot = claim(set, key);
	if (slot)
		fill(&slot->start, run, len);
	else
		start_in_hash(run, len);
}

static __always_inline int end_in_table(const struct run *run, struct dwell_start *out)
{
	struct dwell_slot *slot = find(set_of(run->key), run->key);

	if (!slot)
		return state.overflow_live && end_in_hash(run, out);
	*out = slot->start;
	release(slot);
	return 1;
}

#endif
