/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The calls of one function, whichever way entry and exit find each other. Each
 * function is an object of its own, specialised through .rodata, so the verifier
 * removes whatever it does not use. The targets are set at load time.
 */
#ifndef DWELL_CALL_H
#define DWELL_CALL_H

#include "filter.bpf.h"
#include "frame.bpf.h"
#include "histogram.bpf.h"
#include "ring.bpf.h"
#include "slowest.bpf.h"
#include "story.bpf.h"

/* The number of its end among those of the probe. */
const volatile __u64 end = 0;
/* The words of the context that are the value returned, the packet, and what the fingerprint is made of; or NO_WORD. */
const volatile __u32 return_word = NO_WORD;
const volatile __u32 skb_word = NO_WORD;
const volatile __u32 fingerprint_word = NO_WORD;
/* Only calls that meet this are measured; enum condition. */
const volatile __u32 condition = 0;
/* The word of the argument that it is about. */
const volatile __u32 condition_word = 0;
/* Where its group is found, and whose packet it is: enum subject_source, and a word; NO_WORD: nowhere. */
const volatile __u32 subject_source = 0;
const volatile __u32 subject_word = NO_WORD;
/* Beside a packet, the word that is its socket, or NO_WORD. */
const volatile __u32 subject_sock = NO_WORD;
/* The netfilter hook (NF_INET_...) that CONDITION_NF_HOOK asks for. */
const volatile __u32 nf_hook = 0;

enum condition {
	CONDITION_NONE,
	CONDITION_TC_INGRESS, /* the packet came in by tc */
	CONDITION_TC_EGRESS,
	CONDITION_NF_HOOK,    /* the struct nf_hook_state is of one hook of IPv4 or IPv6 */
};

/*
 * A struct only gets into the object's type information, with which the Rust
 * side compares its own layout, by way of a global of its type.
 */
const volatile struct dwell_record record_layout = {};

/* Read at the start: by the exit the callee may have freed the packet. */
static __always_inline __u32 skb_len(const __u64 *ctx)
{
	struct sk_buff *skb;

	if (!makes_records() || skb_word >= NO_WORD)
		return 0;
	skb = (struct sk_buff *)ctx_word(ctx, skb_word);
	return skb ? skb->len : 0;
}

static __always_inline __u64 call_group(const __u64 *ctx)
{
	return group_by ? group_of(ctx, subject_source, subject_word) : 0;
}

static __always_inline int meets_condition(const __u64 *ctx)
{
	const struct nf_hook_state *hook;
	const struct sk_buff *skb;
	int ingress;

	switch (condition) {
	case CONDITION_TC_INGRESS:
	case CONDITION_TC_EGRESS:
		skb = (const struct sk_buff *)ctx_word(ctx, condition_word);
		if (!skb)
			return 0;
		ingress = BPF_CORE_READ_BITFIELD(skb, tc_at_ingress);
		return ingress == (condition == CONDITION_TC_INGRESS);
	case CONDITION_NF_HOOK:
		hook = (const struct nf_hook_state *)ctx_word(ctx, condition_word);
		return hook && hook->hook == nf_hook && (hook->pf == NFPROTO_IPV4 || hook->pf == NFPROTO_IPV6);
	}
	return 1;
}

/* Whether a call may be left out although it was seen, so that an exit without a start means nothing. */
static __always_inline int is_choosy(void)
{
	return condition != CONDITION_NONE || test_count;
}

/* Whether it is to be measured. What it starts with is found out where that is needed, for this or for an event. */
static __always_inline int is_wanted(const __u64 *ctx, struct subject *subject)
{
	if (!meets_condition(ctx))
		return 0;
	if (cbpf_count)
		ask_pcap(ctx, subject_source, subject_word, subject);
	if (needs_subject && !find_subject(ctx, subject_source, subject_word, subject_sock, subject))
		return 0;
	return !test_count || passes(subject, counters_of(bpf_get_smp_processor_id()));
}

/*
 * Where the start's length and CPU are, the record has them in one word, and so are its end and whether it is
 * suspect: a copy takes half the steps.
 */
#define FOLLOWS(type, second, first) (__builtin_offsetof(type, second) == __builtin_offsetof(type, first) + 4)
_Static_assert(FOLLOWS(struct dwell_start, cpu, len) && FOLLOWS(struct dwell_record, cpu_start, len), "length and CPU");
_Static_assert(FOLLOWS(struct dwell_record, suspect, end), "end and suspect");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of the two is the low half");

/*
 * `lean`: the packet is the first argument. Without an identity, `identity` is NULL, and the record is short.
 */
static __always_inline void write_record(struct dwell_record *r, const struct run *run, const struct dwell_start *start,
					 const struct dwell_identity *identity, __u64 latency, int certain, int lean)
{
	const __u64 *ctx = run->ctx;

	r->start_ns = start->ns;
	r->latency_ns = latency;
	r->ret = ctx_word(ctx, return_word);
	r->skb = lean ? ctx[0] : ctx_word(ctx, skb_word);
	*(__u64 *)&r->end = certain ? end : end | 1ULL << 32;
	*(__u64 *)&r->len = *(const __u64 *)&start->len;
	r->cpu_end = run->cpu;
	identify(r, lean ? bpf_get_current_task_btf() : run->task);
	if (identity)
		((struct dwell_identified_record *)r)->identity = *identity;
	if (!lean && with_story)
		tell(r, run, start);
}

/* `lean`: as above, and rings have room for no longer records. */
static __always_inline void emit(const struct run *run, const struct dwell_start *start,
				 const struct dwell_identity *identity, __u64 latency, int certain, int lean,
				 int has_cmpxchg)
{
	int identified = identity && with_identity;
	__u32 size = !lean && with_story ? sizeof(struct dwell_full_record) :
		     identified ? sizeof(struct dwell_identified_record) : sizeof(struct dwell_record);
	__u64 stride = lean ? sizeof(__u64) + sizeof(struct dwell_record) : ring_stride;
	struct place place = reserve(run->cpu, size, stride, has_cmpxchg);

	if (!place.record) {
		count(&counters_of(run->cpu)->ring_dropped);
		return;
	}
	write_record(place.record, run, start, identified ? identity : 0, latency, certain, lean);
	submit(&place, has_cmpxchg);
}

/*
 * Keeps a call that is slow, unless others have been slower by now. Returns 1, which
 * callers must look at, as that of find_subject().
 */
FUNCTION int keep_slow(const struct run *run, const struct waiting *ended, __u64 latency, __u32 certain)
{
	__u64 generation = slowest_generation;
	struct dwell_slowest *slowest = slowest_of(run->cpu, generation);
	struct dwell_slow *slow;
	int done = 1;

	if (slowest) {
		slow = take_slow(slowest, generation, latency);
		if (slow) {
			write_record((void *)(slow + 1), run, &ended->start, with_identity ? &ended->identity : 0,
				     latency, certain, 0);
			put_slow(slowest, slow, latency);
		}
	}
	asm volatile("" : "+r"(done));
	return done;
}

/*
 * The rest of a lean program, for calls that may become events: apart, so that the
 * others don't pay for it. The slot is still the call's own.
 */
FUNCTION int emit_apart(const __u64 *ctx, const struct dwell_slot *slot, __u64 latency, __u32 certain)
{
	__u32 cpu = bpf_get_smp_processor_id();
	struct run run = { .ctx = ctx, .cpu = cpu };

	/* For the verifier. */
	if (!slot || !is_wanted_event(counters_of(cpu), slot->start.ns + latency, latency))
		return 0;
	run.task = bpf_get_current_task_btf();
	emit(&run, &slot->start, 0, latency, certain, 0, 1);
	return 0;
}

/* Which calls become events, where a program knows it without looking. */
enum events {
	NO_EVENTS,
	SOME_EVENTS,
	ALL_EVENTS,
};

/* Where every call becomes one, the way to another function would be paid for each time. */
static __always_inline void emit_lean(const __u64 *ctx, const struct dwell_slot *slot, __u64 latency, int certain,
				      enum events events)
{
	struct run run = { .ctx = ctx };

	if (events == SOME_EVENTS && latency >= min_latency_ns)
		emit_apart(ctx, slot, latency, certain);
	if (events == ALL_EVENTS) {
		run.cpu = bpf_get_smp_processor_id();
		emit(&run, &slot->start, 0, latency, certain, 1, 1);
	}
}

/*
 * What events tell of the start, where the first argument is the packet. Should it be NULL, the kernel reads 0: it
 * checks the pointer in the register, to which the load itself adds the offset.
 */
static __always_inline void note_packet(struct dwell_start *start, const __u64 *ctx)
{
	start->cpu = bpf_get_smp_processor_id();
	start->len = ((const struct sk_buff *)ctx[0])->len;
}

/* A call that has returned, with a start that is its own or, where that isn't certain, may be. */
static __always_inline void complete(const struct run *run, const struct waiting *ended, __u64 now, int certain,
				     int has_cmpxchg)
{
	const struct dwell_start *start = &ended->start;
	__u64 latency = now - start->ns;

	if (is_expired(start, now)) {
		count(&run->counters->expired);
		return;
	}
	if (!record_latency(run, start, latency, certain, has_cmpxchg))
		return;
	if (slowest_count && is_slow(run->cpu, latency) && !keep_slow(run, ended, latency, certain))
		return;
	if (wants_events && is_wanted_event(run->counters, now, latency))
		emit(run, start, &ended->identity, latency, certain, 0, has_cmpxchg);
}

static __always_inline void no_start(const struct run *run)
{
	if (!is_choosy())
		count(&run->counters->unmatched);
}

static const struct waiting nothing_waits = {};

/* When it started; 0: there was no room. */
static __always_inline __u64 start_in_hash(const struct run *run, __u32 len, const struct dwell_identity *identity)
{
	__u64 key = run->key;
	struct dwell_start *start;
	struct waiting *waiting;
	long exists;

	/* Before it can be found, so that who looks for it doesn't leave it out. */
	add(&state.overflow_live, 1);
	exists = bpf_map_update_elem(&dwell_overflow, &key, &nothing_waits, BPF_NOEXIST);
	if (exists)
		add(&state.overflow_live, -1);
	/* Filled in place, so that the map's own cost lies outside the span. */
	waiting = bpf_map_lookup_elem(&dwell_overflow, &key);
	if (!waiting) {
		count(&run->counters->untracked);
		return 0;
	}
	start = &waiting->start;
	if (with_identity)
		waiting->identity = *identity;
	if (exists)
		count(&run->counters->overwritten);
	fill(start, run, len);
	seal(start, key);
	return start->ns;
}

/* Of a start that lost its exit. One of no time began while the probe was off, and isn't counted. */
static __always_inline void overwrite(const struct run *run, const struct dwell_start *stale)
{
	if (!stale->ns)
		return;
	if (max_age_ns && is_expired(stale, bpf_ktime_get_ns()))
		count(&run->counters->expired);
	else
		count(&run->counters->overwritten);
}

#endif
