// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * One span's programs: an fentry and an fexit program on one function. Each
 * span is an object of its own, specialised through .rodata, so the verifier
 * removes whatever that span does not use. The targets are set at load time.
 */
#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include "dwell.h"
#include "inflight.bpf.h"

/* The span's index in its probe. */
const volatile __u32 span = 0;
/* The argument word that is a struct sk_buff *; >= arg_words: there is none. */
const volatile __u32 skb_word = 0;
/* Non-zero where the function returns a value. */
const volatile __u32 returns = 0;

/* Shared by all spans of a probe. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20);
} dwell_ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DWELL_CONTROLS);
	__type(key, __u32);
	__type(value, __u64);
} dwell_control SEC(".maps");

/*
 * A struct only gets into the object's type information, with which the Rust
 * side compares its own layout, by way of a global of its type.
 */
const volatile struct dwell_record record_layout = {};

/* Read at the start: by the exit the callee may have freed the packet. */
static __always_inline __u32 skb_len(const __u64 *ctx)
{
	struct sk_buff *skb;

	if (skb_word >= arg_words)
		return 0;
	skb = (struct sk_buff *)ctx_word(ctx, skb_word);
	return skb ? skb->len : 0;
}

/* The kernel's verifier turns this look-up into an addition. */
static __always_inline __u64 *control(__u32 which)
{
	return bpf_map_lookup_elem(&dwell_control, &which);
}

/*
 * Off until every hook of the probe is live, so that all spans see the same
 * calls. It is never switched off again: an exit program that ran on while
 * entries went unseen would take stale starts for their calls'.
 */
static __always_inline int is_on(void)
{
	__u64 *on = control(DWELL_ON);

	return on && *on;
}

/* The reader polls; a record wakes it only where it said that it sleeps. */
static __always_inline __u64 wake_flag(void)
{
	__u64 *wake = control(DWELL_WAKE);

	if (!wake || !*wake)
		return BPF_RB_NO_WAKEUP;
	*wake = 0;
	return BPF_RB_FORCE_WAKEUP;
}

/* Whose call it is; task is NULL where the kernel has no pointer to offer. */
static __always_inline void identify(struct dwell_record *r, const struct task_struct *task)
{
	__u64 id;

	if (task) {
		r->pid = task->tgid;
		r->tid = task->pid;
		__builtin_memcpy(r->comm, task->comm, sizeof(r->comm));
		return;
	}
	id = bpf_get_current_pid_tgid();
	r->pid = id >> 32;
	r->tid = id;
	bpf_get_current_comm(r->comm, sizeof(r->comm));
}

static __always_inline void emit(const struct run *run, const struct dwell_start *start, __u64 now)
{
	struct dwell_record *r = bpf_ringbuf_reserve(&dwell_ring, sizeof(*r), 0);
	const __u64 *ctx = run->ctx;

	if (!r) {
		count(&run->counters->ring_dropped);
		return;
	}
	r->start_ns = start->ns;
	r->latency_ns = now - start->ns;
	r->ret = returns ? ctx_word(ctx, arg_words) : 0;
	r->skb = skb_word < arg_words ? ctx_word(ctx, skb_word) : 0;
	r->span = span;
	r->cpu_start = start->cpu;
	r->cpu_end = run->cpu;
	r->len = start->len;
	r->suspect = !is_certain(run, start);
	r->reserved = 0;
	identify(r, run->task);
	bpf_ringbuf_submit(r, wake_flag());
}

static __always_inline void finish(const struct run *run, const struct dwell_start *start, __u64 now)
{
	/*
	 * Another call's start (see fingerprint()), or a clock that went
	 * backwards, which the kernel's fast clock may across an NMI: no
	 * latency is better than a wrong one.
	 */
	if (start->fingerprint != fingerprint(run) || now < start->ns) {
		count(&run->counters->mismatched);
		return;
	}
	count(&run->counters->completed);
	emit(run, start, now);
}

SEC("fentry")
int call_entry(__u64 *ctx)
{
	struct run run;

	if (!is_on())
		return 0;
	run = run_of(ctx, bpf_get_current_task_btf());
	count(&run.counters->started);
	start_in_table(&run, skb_len(ctx));
	return 0;
}

SEC("fexit")
int call_exit(__u64 *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct run run = run_of(ctx, bpf_get_current_task_btf());
	struct dwell_start start;

	if (end_in_table(&run, &start))
		finish(&run, &start, now);
	else if (is_on())
		count(&run.counters->unmatched);
	return 0;
}

/*
 * The same for kernels before 5.12, which have neither compare-and-swap nor
 * bpf_get_current_task_btf(), and no recursion guard that could skip a program.
 */
SEC("fentry")
int call_entry_hash(__u64 *ctx)
{
	struct run run;

	if (!is_on())
		return 0;
	run = run_of(ctx, 0);
	count(&run.counters->started);
	start_in_hash(&run, skb_len(ctx));
	return 0;
}

SEC("fexit")
int call_exit_hash(__u64 *ctx)
{
	__u64 now = bpf_ktime_get_ns();
	struct run run = run_of(ctx, 0);
	struct dwell_start start;

	if (end_in_hash(&run, &start))
		finish(&run, &start, now);
	else if (is_on())
		count(&run.counters->unmatched);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
