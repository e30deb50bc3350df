//! Handing events over takes no memory for each: by raw tracepoints, on the machine that runs the test. Where that isn't
//! possible, `native_delivery.rs` checks that it is explained.

#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use dwell::{Hook, LatencyProbe, LatencyProbeBuilder, Span};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: it does what the system's allocator does.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: passed on as it came.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn across() -> LatencyProbeBuilder {
    let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
    LatencyProbe::builder().span(span.named("across"))
}

type Attach = fn() -> Result<LatencyProbe, dwell::Error>;

/// Sends packets in bursts, with pauses for the reader to fall asleep in some of them.
fn traffic(socket: &UdpSocket, packets: u32) {
    for n in 0..packets {
        socket.send(b"x").unwrap();
        socket.recv(&mut [0; 8]).unwrap();
        if n % (packets / 4) == 0 {
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Ten thousand events take hardly more allocations than none, whichever way they go.
#[test]
fn no_allocation_for_each_event() {
    const PACKETS: u32 = 10_000;
    let ways: [(&str, Attach); 3] = [
        ("callback", || across().attach_with(|event| assert!(event.latency() > Duration::ZERO))),
        ("batches", || across().in_batches(256).attach()),
        ("events", || across().attach()),
    ];
    for (way, attach) in ways {
        let probe = match attach() {
            Ok(probe) => probe,
            Err(error) => {
                println!("no_allocation_for_each_event: not possible on this machine: {error}");
                return;
            }
        };
        let (events, batches) = (probe.events().clone(), probe.batches().clone());
        let receiver =
            thread::spawn(move || events.iter().count() + batches.iter().map(|batch| batch.len()).sum::<usize>());
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(socket.local_addr().unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // Vectors that go round have to be made first.
        traffic(&socket, PACKETS);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        traffic(&socket, PACKETS);
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        let ledger = probe.stop();
        receiver.join().unwrap();
        assert!(ledger.spans[0].delivered >= u64::from(2 * PACKETS), "{ledger}");
        println!("{way}: {allocations} allocations");
        assert!(allocations < u64::from(PACKETS) / 100, "{way}: {allocations}");
    }
}
