//! What makes up a stage, on any kernel: functions that are called on the normal path of each.

use super::Stage;
use crate::span::Key;

/// Parts that are disjoint: each is wanted, and one is enough.
pub(crate) type Parts<T> = &'static [Alternatives<T>];

/// The first that a kernel has. What only some kernels have, or under another name, comes before what all have.
pub(crate) type Alternatives<T> = &'static [T];

/// What makes up a stage.
#[derive(Debug)]
pub(crate) enum Recipe {
    /// Each call, from entry to exit.
    Calls(Parts<Call>),
    /// From any of these points to any of those.
    Between { from: Parts<Point>, to: Parts<Point>, key: Key },
}

/// The calls of a function, and which of them. `MODULE:FUNCTION` may as well be part of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Call(pub(crate) &'static str, pub(crate) Which);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    /// With a packet that tc has seen come in.
    Ingress,
    /// With one that tc sees go out.
    Egress,
    /// With a `struct nf_hook_state` of this one of netfilter's hooks.
    Hook(u32),
}

/// A hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Point {
    Entry(&'static str),
    /// The entry of a function whose argument of this number carries the key.
    Argument(&'static str, usize),
    /// The exit of a function that returns the key.
    Returned(&'static str),
    Tracepoint(&'static str),
}

// enum nf_inet_hooks
pub(crate) const PRE_ROUTING: u32 = 0;
pub(crate) const LOCAL_IN: u32 = 1;
pub(crate) const FORWARD: u32 = 2;
pub(crate) const LOCAL_OUT: u32 = 3;
pub(crate) const POST_ROUTING: u32 = 4;

impl Recipe {
    pub(crate) fn of(stage: Stage) -> Self {
        use Point::{Argument, Entry, Returned, Tracepoint};
        use Which::{All, Egress, Hook, Ingress};
        match stage {
            // 5.10 has it inlined in the loop over all devices.
            Stage::NapiPoll => Self::Calls(&[&[Call("__napi_poll", All), Call("net_rx_action", All)]]),
            Stage::GenericXdp => {
                Self::Calls(&[&[Call("bpf_prog_run_generic_xdp", All), Call("netif_receive_generic_xdp", All)]])
            }
            // Where there is a tc_run(), tcf_classify() is also what queueing disciplines call.
            Stage::TcIngress => Self::Calls(&[&[
                Call("tcf_classify_ingress", All),
                Call("tc_run", Ingress),
                Call("tcf_classify", Ingress),
            ]]),
            Stage::TcEgress => Self::Calls(&[&[Call("tc_run", Egress), Call("tcf_classify", Egress)]]),
            Stage::Gro => Self::Calls(&[&[Call("dev_gro_receive", All)]]),
            // For lists, too, which are taken apart into packets first.
            Stage::NetfilterPreRouting => Self::Calls(&[&[Call("nf_hook_slow", Hook(PRE_ROUTING))]]),
            Stage::NetfilterLocalIn => Self::Calls(&[&[Call("nf_hook_slow", Hook(LOCAL_IN))]]),
            Stage::NetfilterForward => Self::Calls(&[&[Call("nf_hook_slow", Hook(FORWARD))]]),
            Stage::NetfilterLocalOut => Self::Calls(&[&[Call("nf_hook_slow", Hook(LOCAL_OUT))]]),
            Stage::NetfilterPostRouting => Self::Calls(&[&[Call("nf_hook_slow", Hook(POST_ROUTING))]]),
            Stage::FirewallRules => Self::Calls(&[
                &[Call("nf_tables:nft_do_chain", All)],
                &[Call("ip_tables:ipt_do_table", All)],
                &[Call("ip6_tables:ip6t_do_table", All)],
            ]),
            Stage::Conntrack => Self::Calls(&[
                &[Call("nf_conntrack:nf_conntrack_in", All)],
                &[Call("nf_conntrack:__nf_conntrack_confirm", All)],
            ]),
            // The latter for packets that go where the one before in the same list did.
            Stage::RouteInput => {
                Self::Calls(&[&[Call("ip_route_input_noref", All)], &[Call("ip_route_use_hint", All)]])
            }
            Stage::RouteOutput => Self::Calls(&[&[Call("ip_route_output_key_hash_rcu", All)]]),
            Stage::RouteIpv6 => {
                Self::Calls(&[&[Call("ipv6:ip6_route_input", All)], &[Call("ipv6:ip6_route_output_flags", All)]])
            }
            // Single packets and lists both pass the *_core functions.
            Stage::IpReceive => Self::Between {
                from: &[&[Entry("ip_rcv_core")], &[Entry("ipv6:ip6_rcv_core")]],
                to: &[
                    &[Entry("ip_protocol_deliver_rcu")],
                    &[Entry("ipv6:ip6_protocol_deliver_rcu")],
                    &[Entry("ip_forward")],
                    &[Entry("ipv6:ip6_forward")],
                ],
                key: Key::Skb,
            },
            // TCP over IPv6 has a way of its own. The function behind this one, ip6_xmit(), sees more, but has too many
            // arguments for older kernels.
            Stage::IpSend => Self::Between {
                from: &[&[Entry("__ip_local_out")], &[Entry("ipv6:__ip6_local_out")], &[Entry("ipv6:inet6_csk_xmit")]],
                to: &[&[Entry("__dev_queue_xmit")]],
                key: Key::Skb,
            },
            Stage::Neighbour => Self::Between {
                from: &[&[Entry("ip_finish_output2")], &[Entry("ipv6:ip6_finish_output2")]],
                to: &[&[Entry("__dev_queue_xmit")]],
                key: Key::Skb,
            },
            // Tracepoints only, so that it can be had where functions can't be traced.
            Stage::Qdisc => Self::Between {
                from: &[&[Tracepoint("net_dev_queue")]],
                to: &[&[Tracepoint("net_dev_start_xmit")]],
                key: Key::Skb,
            },
            Stage::DriverTransmit => Self::Calls(&[&[Call("dev_hard_start_xmit", All)]]),
            Stage::TcpReceive => Self::Calls(&[&[Call("tcp_v4_rcv", All)], &[Call("ipv6:tcp_v6_rcv", All)]]),
            Stage::TcpSend => Self::Calls(&[&[Call("tcp_sendmsg", All)]]),
            Stage::UdpReceive => Self::Calls(&[&[Call("udp_rcv", All)], &[Call("ipv6:udpv6_rcv", All)]]),
            Stage::UdpSend => Self::Calls(&[&[Call("udp_sendmsg", All)], &[Call("ipv6:udpv6_sendmsg", All)]]),
            Stage::SocketQueue => Self::Between {
                from: &[&[Entry("tcp_queue_rcv")], &[Entry("__udp_enqueue_schedule_skb")]],
                to: &[&[Entry("skb_consume_udp")], &[Tracepoint("skb_copy_datagram_iovec")]],
                key: Key::Skb,
            },
            // The function within this one that puts the connection into the queue is mostly inlined.
            Stage::Accept => Self::Between {
                from: &[&[Argument("inet_csk_complete_hashdance", 1)]],
                to: &[&[Returned("inet_csk_accept")]],
                key: Key::Sock,
            },
        }
    }

    /// Whether it has other hooks than the entry and the exit of functions.
    pub(crate) fn has_hooks(&self) -> bool {
        matches!(self, Self::Between { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hook::is_name;

    /// Every stage's recipe names something in each of its parts, and nothing twice.
    #[test]
    fn every_stage_has_one() {
        for &stage in Stage::ALL {
            let names: Vec<Vec<&str>> = match Recipe::of(stage) {
                Recipe::Calls(parts) => parts.iter().map(|part| part.iter().map(|call| call.0).collect()).collect(),
                Recipe::Between { from, to, key } => {
                    assert!(!from.is_empty() && !to.is_empty() && key != Key::Call, "{stage}");
                    let name = |point: &Point| match *point {
                        Point::Entry(name) | Point::Argument(name, _) => name,
                        Point::Returned(name) | Point::Tracepoint(name) => name,
                    };
                    from.iter().chain(to).map(|part| part.iter().map(name).collect()).collect()
                }
            };
            assert!(!names.is_empty() && names.iter().all(|part| !part.is_empty()), "{stage}");
            let mut all = names.concat();
            assert!(all.iter().all(|name| is_name(name)), "{stage}");
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count, "{stage}");
        }
    }
}
