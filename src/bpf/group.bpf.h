/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whose histogram a span belongs to, where they are kept apart. Found at the start: by the end the packet may be gone. */
#ifndef DWELL_GROUP_H
#define DWELL_GROUP_H

#include "args.bpf.h"
#include "packet.bpf.h"

/* enum group_by */
const volatile __u32 group_by = 0;

enum group_by {
	GROUP_BY_NOTHING,
	GROUP_BY_INTERFACE,
	GROUP_BY_PROTOCOL,
	GROUP_BY_LOCAL_PORT,
};

static __always_inline __u64 group_of_sock(const struct sock *sk)
{
	if (!sk)
		return 0;
	if (group_by == GROUP_BY_INTERFACE)
		return (__u32)sk->__sk_common.skc_bound_dev_if;
	if (group_by == GROUP_BY_LOCAL_PORT)
		return sk->__sk_common.skc_num;
	return protocol_of_sock(sk);
}

static __always_inline __u64 group_of_skb(const struct sk_buff *skb)
{
	struct dwell_flow flow = {};
	const struct net_device *dev;
	const struct sock *sk;

	if (!skb)
		return 0;
	if (group_by == GROUP_BY_INTERFACE) {
		dev = skb->dev;
		return dev ? (__u32)dev->ifindex : 0;
	}
	if (group_by == GROUP_BY_LOCAL_PORT) {
		/* Loaded once: the verifier believes in what was compared with NULL. */
		sk = skb->sk;
		if (sk)
			return sk->__sk_common.skc_num;
	}
	if (!flow_of_skb(skb, &flow))
		return 0;
	return group_by == GROUP_BY_PROTOCOL ? flow.protocol : bpf_ntohs(flow.dport);
}

/* 0: it is in no group. */
static __always_inline __u64 group_of(const __u64 *ctx, __u32 source, __u32 word)
{
	const struct socket *socket;

	switch (source) {
	case SUBJECT_SOCK:
		return group_of_sock((const struct sock *)ctx_word(ctx, word));
	case SUBJECT_SOCKET:
		socket = (const struct socket *)ctx_word(ctx, word);
		return socket ? group_of_sock(socket->sk) : 0;
	}
	return group_of_skb((const struct sk_buff *)ctx_word(ctx, word));
}

#endif
