/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which starts are wanted: tests of what is known of the packet, the socket and the
 * thread, in a table that user space compiled from and, or and not. Each leads to
 * a later one, so that no more are made than it takes.
 */
#ifndef DWELL_FILTER_H
#define DWELL_FILTER_H

#include "inflight.bpf.h"
#include "packet.bpf.h"
#include "pcap.bpf.h"

/* How many there are; 0: all is wanted. */
const volatile __u32 test_count = 0;
/* Whether any of them, or an event, asks for more than the thread. */
const volatile __u32 needs_subject = 0;
const volatile struct dwell_test tests[DWELL_TESTS] = {};

/* What a number is that is only known if `known` is; not even then there is one where `none` is. */
static __always_inline enum answer in_range(const volatile struct dwell_test *test, __u32 value, int is_known)
{
	if (!is_known)
		return CANNOT_TELL;
	value &= test->mask[0];
	return value >= test->low[0] && value <= test->high ? YES : NO;
}

static __always_inline enum answer same_words(const volatile struct dwell_test *test, const __u32 *words)
{
	__u32 differ = 0;

#pragma unroll
	for (int n = 0; n < 4; n++) {
		differ |= (words[n] & test->mask[n]) ^ test->low[n];
		/* One word after the other, or clang 22 reads all of them first, onto a stack that is short of room. */
		asm volatile("" : "+r"(differ));
	}
	return differ ? NO : YES;
}

static __always_inline enum answer is_address(const volatile struct dwell_test *test, const struct dwell_identity *id,
					      const __u8 *address)
{
	if (id->known & DWELL_KNOWS_NOT_IP)
		return NO;
	if (!(id->known & DWELL_KNOWS_ADDRESSES))
		return CANNOT_TELL;
	return id->flow.version == test->high ? same_words(test, (const __u32 *)address) : NO;
}

static __always_inline enum answer is_port(const volatile struct dwell_test *test, const struct dwell_identity *id,
					   int is_source)
{
	__u32 known = is_source ? DWELL_KNOWS_SPORT : DWELL_KNOWS_DPORT;

	/* What a later fragment has in its place is no port. */
	if (id->known & (DWELL_KNOWS_NO_PORTS | DWELL_KNOWS_NOT_IP))
		return NO;
	return in_range(test, bpf_ntohs(is_source ? id->flow.sport : id->flow.dport), id->known & known);
}

static __always_inline enum answer is_own_port(const volatile struct dwell_test *test,
					       const struct dwell_identity *id, __u8 from_here)
{
	if (id->known & (DWELL_KNOWS_NO_PORTS | DWELL_KNOWS_NOT_IP))
		return NO;
	if (!id->direction)
		return CANNOT_TELL;
	return is_port(test, id, id->direction == from_here);
}

static __always_inline enum answer is_protocol(const volatile struct dwell_test *test,
					       const struct dwell_identity *id, __u8 value, __u32 known)
{
	return id->known & DWELL_KNOWS_NOT_IP ? NO : in_range(test, value, id->known & known);
}

static __always_inline enum answer is_named(const volatile struct dwell_test *test)
{
	__u32 comm[DWELL_COMM_LEN / 4] = {};

	bpf_get_current_comm(comm, sizeof(comm));
	return same_words(test, comm);
}

/* Whether it is in the cgroup of this id, or below. */
static __always_inline enum answer is_in_cgroup(const volatile struct dwell_test *test, __u64 address)
{
	const struct cgroup *cgroup = (const struct cgroup *)address, *ancestor = 0;
	__u64 id = 0;
	__u32 depth = test->high;

	if (!reads_memory || !cgroup)
		return CANNOT_TELL;
	if (BPF_CORE_READ(cgroup, level) < (int)depth)
		return NO;
	if (bpf_core_field_exists(cgroup->ancestors)) {
		bpf_probe_read_kernel(&ancestor, sizeof(ancestor),
				      (void *)cgroup + bpf_core_field_offset(cgroup->ancestors) + depth * 8);
		id = BPF_CORE_READ(ancestor, kn, id);
	} else {
		bpf_probe_read_kernel(&id, sizeof(id),
				      (void *)cgroup + bpf_core_field_offset(cgroup->ancestor_ids) + depth * 8);
	}
	if (!id)
		return CANNOT_TELL;
	return id == ((__u64)test->low[1] << 32 | test->low[0]) ? YES : NO;
}

static __always_inline enum answer ask(const volatile struct dwell_test *test, const struct subject *subject)
{
	const struct dwell_identity *id = &subject->waiting.identity;

	switch (test->field) {
	case DWELL_SOURCE_ADDRESS:
		return is_address(test, id, id->flow.saddr);
	case DWELL_DESTINATION_ADDRESS:
		return is_address(test, id, id->flow.daddr);
	case DWELL_SOURCE_PORT:
		return is_port(test, id, 1);
	case DWELL_DESTINATION_PORT:
		return is_port(test, id, 0);
	case DWELL_LOCAL_PORT:
		return is_own_port(test, id, DWELL_OUTGOING);
	case DWELL_REMOTE_PORT:
		return is_own_port(test, id, DWELL_INCOMING);
	case DWELL_PROTOCOL:
		return is_protocol(test, id, id->flow.protocol, DWELL_KNOWS_PROTOCOL);
	case DWELL_VERSION:
		return is_protocol(test, id, id->flow.version, DWELL_KNOWS_VERSION);
	case DWELL_LENGTH:
		return in_range(test, id->len, id->known & DWELL_KNOWS_PACKET);
	case DWELL_MARK:
		return in_range(test, id->mark, id->known & DWELL_KNOWS_MARK);
	case DWELL_INTERFACE:
		return in_range(test, id->interface, id->known & DWELL_KNOWS_INTERFACE);
	case DWELL_RECEIVED_ON:
		/* What was sent from here wasn't received; else it may not have been noted yet. */
		return in_range(test, id->received_on,
				id->known & DWELL_KNOWS_RECEIVED || id->direction == DWELL_OUTGOING);
	case DWELL_NETNS:
		return in_range(test, id->netns, id->known & DWELL_KNOWS_NETNS);
	case DWELL_PID:
		return in_range(test, bpf_get_current_pid_tgid() >> 32, 1);
	case DWELL_TID:
		return in_range(test, bpf_get_current_pid_tgid(), 1);
	case DWELL_COMM:
		return is_named(test);
	case DWELL_CGROUP:
		return is_in_cgroup(test, subject->cgroup);
	case DWELL_PCAP:
		return pcap_answer(subject);
	}
	return CANNOT_TELL;
}

#define MET_UNKNOWN (1 << 8)

/*
 * How the tests come out, if what can't be told is taken for what is wanted, or for
 * what isn't; and whether there was anything of that.
 */
FUNCTION int run_tests(const struct subject *subject, __u32 optimistic)
{
	__u32 next = 0, unknown = 0;

	for (__u32 n = 0; n < DWELL_TESTS; n++) {
		const volatile struct dwell_test *test = &tests[n];
		enum answer answer;

		if (n >= test_count)
			break;
		if (next != n)
			continue;
		answer = ask(test, subject);
		if (answer == CANNOT_TELL) {
			unknown = MET_UNKNOWN;
			answer = optimistic != test->negated ? YES : NO;
		}
		next = answer == YES ? test->on_true : test->on_false;
	}
	return (next == DWELL_ACCEPT) | unknown;
}

/* Three-valued logic: what it comes out to either way is so, whatever couldn't be told. */
static __always_inline int passes(const struct subject *subject, struct dwell_counters *counters)
{
	int result = run_tests(subject, 0);

	if (result & 1)
		return 1;
	if (probe_on && result & MET_UNKNOWN && run_tests(subject, 1) & 1)
		count(&counters->unparsed);
	return 0;
}

#endif
