/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The flow of a packet or of a socket: protocol, addresses, ports. */
#ifndef DWELL_FLOW_H
#define DWELL_FLOW_H

#include "args.bpf.h"
#include "shared.bpf.h"

enum {
	IPPROTO_HOPOPTS = 0,
	IPPROTO_IPIP = 4,
	IPPROTO_TCP = 6,
	IPPROTO_UDP = 17,
	IPPROTO_DCCP = 33,
	IPPROTO_IPV6 = 41,
	IPPROTO_ROUTING = 43,
	IPPROTO_FRAGMENT = 44,
	IPPROTO_AH = 51,
	IPPROTO_DSTOPTS = 60,
	IPPROTO_SCTP = 132,
	IPPROTO_UDPLITE = 136,
};

enum {
	TCP_TIME_WAIT = 6,
	TCP_NEW_SYN_RECV = 12,
};

/* Of a struct dwell_flow, 32 bits each. */
#define FLOW_WORDS ((int)(sizeof(struct dwell_flow) / 4))

/* IPv6 extension headers that are looked behind, at most. */
#define MAX_EXTENSIONS 6

/* Copies packet bytes [at, at + len) from the linear part; 0 if it has them. */
static __always_inline int header(const struct sk_buff *skb, void *to, __u32 len, __u32 at)
{
	if (!reads_memory || at + len > skb->tail)
		return -1;
	return bpf_probe_read_kernel(to, len, skb->head + at);
}

static __always_inline int has_ports(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP ||
	       protocol == IPPROTO_DCCP || protocol == IPPROTO_UDPLITE;
}

/*
 * One more thing is known of it. The verifier doesn't get to know which: else it would
 * look at all that follows once for each combination.
 */
static __always_inline void learn(struct dwell_identity *id, __u32 what)
{
	id->known = any_u32(id->known | what);
}

static __always_inline void forget(struct dwell_identity *id, __u32 what)
{
	id->known = any_u32(id->known & ~what);
}

/* What else the IP header tells, if anybody wants to know. */
static __always_inline void note_ip(struct dwell_identity *id, __u8 tos, __u8 ttl, int is_later_fragment)
{
	if (!id)
		return;
	id->tos = tos;
	id->ttl = ttl;
	learn(id, DWELL_KNOWS_PROTOCOL | DWELL_KNOWS_ADDRESSES | DWELL_KNOWS_HEADER);
	if (is_later_fragment)
		learn(id, DWELL_KNOWS_NO_PORTS);
}

/* What is read of an IP header at first, of either version: all that IPv4 has in each packet. */
#define IP_HLEN 20

/*
 * The transport header's place, or 0: an IPv4 packet that has none (a later fragment). `ip` has been read at `at`. `id`
 * may be NULL.
 */
static __always_inline __u32 flow_of_ipv4(const __u8 *ip, __u32 at, struct dwell_flow *flow, struct dwell_identity *id)
{
	int is_later_fragment;

	if ((ip[0] & 0xf) < 5)
		return 0;
	/* The fragment's offset, without the flags. */
	is_later_fragment = (ip[6] & 0x1f) || ip[7];
	if (is_later_fragment && !id)
		return 0;
	__builtin_memcpy(flow->saddr, ip + 12, 4);
	__builtin_memcpy(flow->daddr, ip + 16, 4);
	flow->protocol = ip[9];
	note_ip(id, ip[1], ip[8], is_later_fragment);
	return is_later_fragment ? 0 : at + (ip[0] & 0xf) * 4;
}

/* By a mask, since each comparison doubles what the verifier has to look at. */
static __always_inline int is_extension(__u8 next)
{
	const __u64 extensions = 1ULL << IPPROTO_HOPOPTS | 1ULL << IPPROTO_ROUTING | 1ULL << IPPROTO_DSTOPTS |
				 1ULL << IPPROTO_FRAGMENT | 1ULL << IPPROTO_AH;

	return next < 64 && extensions >> next & 1;
}

/* The same of 16 bits. */
static __always_inline __u32 any_u16(__u32 number)
{
	return any_u32(number) & 0xffff;
}

static __always_inline __u32 flow_of_ipv6(const struct sk_buff *skb, const __u8 *ip, __u32 at, struct dwell_flow *flow,
					  struct dwell_identity *id)
{
	int is_later_fragment = 0;
	__u8 extension[4], next;

	if (header(skb, flow->saddr, 32, at + 8))
		return 0;
	next = ip[6];
	at += 40;
#pragma unroll
	for (int n = 0; n < MAX_EXTENSIONS; n++) {
		if (!is_extension(next))
			break;
		if (header(skb, extension, sizeof(extension), at))
			return 0;
		if (next == IPPROTO_FRAGMENT) {
			/* 13 bits of offset, three of flags. What follows a later one isn't a header. */
			is_later_fragment = extension[2] || (extension[3] & 0xf8);
			next = extension[0];
			if (is_later_fragment)
				break;
			at = any_u16(at + 8);
			continue;
		}
		at = any_u16(at + (next == IPPROTO_AH ? (extension[1] + 2) * 4 : (extension[1] + 1) * 8));
		next = extension[0];
	}
	/* More than that isn't looked behind. */
	if (is_later_fragment ? !id : is_extension(next))
		return 0;
	flow->protocol = next;
	note_ip(id, ip[0] << 4 | ip[1] >> 4, ip[7], is_later_fragment);
	return is_later_fragment ? 0 : at;
}

/*
 * The flow of a packet by its outermost IP header; 0 if that can't be told: not
 * IP, header not set yet or not in the linear part, a later fragment. Whether
 * it is IPv4 or IPv6 is read from the header itself, since skb->protocol isn't
 * set everywhere on the way out.
 */
static __always_inline int flow_of_skb(const struct sk_buff *skb, struct dwell_flow *flow)
{
	__u32 at = skb->network_header, transport;
	__u8 ip[IP_HLEN];

	/* Not set yet; from Linux 3.x on that is ~0, and 0 in a fresh skb. */
	if (!at || at == 0xffff || header(skb, ip, sizeof(ip), at))
		return 0;
	flow->version = ip[0] >> 4;
	if (flow->version == 4)
		transport = flow_of_ipv4(ip, at, flow, 0);
	else if (flow->version == 6)
		transport = flow_of_ipv6(skb, ip, at, flow, 0);
	else
		return 0;
	if (!transport)
		return 0;
	if (!has_ports(flow->protocol))
		return 1;
	/* Source and destination port lie side by side, in all of these. */
	return !header(skb, &flow->sport, 4, transport);
}

/* An IPv4 address within IPv6 (::ffff:a.b.c.d) is IPv4 on the wire. */
static __always_inline int is_mapped(const __u8 *address)
{
	const __u32 *words = (const __u32 *)address;

	return !words[0] && !words[1] && words[2] == bpf_htonl(0xffff);
}

static __always_inline void to_ipv4(__u8 *address)
{
	__u32 *words = (__u32 *)address;

	words[0] = words[3];
	words[2] = 0;
	words[3] = 0;
}

/* What stands for a TCP socket before and after its time has less of a struct sock. */
static __always_inline int is_full(const struct sock *sk)
{
	__u8 state = sk->__sk_common.skc_state;

	return state != TCP_TIME_WAIT && state != TCP_NEW_SYN_RECV;
}

static __always_inline __u8 protocol_of_sock(const struct sock *sk)
{
	return is_full(sk) ? sk->sk_protocol : IPPROTO_TCP;
}

/*
 * The flow of what a socket sends; 0 if it has no peer. Read through typed
 * pointers, so that this works under lockdown, too.
 */
static __always_inline int flow_of_sock(const struct sock *sk, struct dwell_flow *flow)
{
	const struct sock_common *common = &sk->__sk_common;

	flow->dport = common->skc_dport;
	if (!flow->dport)
		return 0;
	flow->sport = bpf_htons(common->skc_num);
	flow->protocol = protocol_of_sock(sk);
	if (common->skc_family == AF_INET) {
		*(__u32 *)flow->saddr = common->skc_rcv_saddr;
		*(__u32 *)flow->daddr = common->skc_daddr;
		flow->version = 4;
		return 1;
	}
	if (common->skc_family != AF_INET6 || !bpf_core_field_exists(common->skc_v6_daddr))
		return 0;
	__builtin_memcpy(flow->saddr, &common->skc_v6_rcv_saddr, 16);
	__builtin_memcpy(flow->daddr, &common->skc_v6_daddr, 16);
	flow->version = 6;
	if (is_mapped(flow->daddr)) {
		to_ipv4(flow->saddr);
		to_ipv4(flow->daddr);
		flow->version = 4;
	}
	return 1;
}

/* The flow of the packets that answer. */
static __always_inline void reverse(struct dwell_flow *flow)
{
	__u8 address[16];
	__u16 port = flow->sport;

	__builtin_memcpy(address, flow->saddr, 16);
	__builtin_memcpy(flow->saddr, flow->daddr, 16);
	__builtin_memcpy(flow->daddr, address, 16);
	flow->sport = flow->dport;
	flow->dport = port;
}

/*
 * Sixty-four bits of a flow: the NH hash of UMAC (RFC 4418, 5.2.2), by which two
 * flows collide with a probability of 2^-32 whatever they are, since `keys` are
 * random and nobody knows them. Two of these, with keys of their own, make key
 * and fingerprint.
 */
static __always_inline __u64 hash_of_flow(const struct dwell_flow *flow, const volatile __u32 *keys)
{
	const __u32 *words = (const __u32 *)flow;
	__u64 hash = 0;

#pragma unroll
	for (int n = 0; n < FLOW_WORDS; n += 2)
		hash += (__u64)(words[n] + keys[n]) * (__u32)(words[n + 1] + keys[n + 1]);
	return hash;
}

#endif
