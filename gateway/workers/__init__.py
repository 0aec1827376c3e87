"""Several worker processes behind one port.

Theory of operation
- The supervisor is the process that was started. It owns the listening socket and the admin port, reads the
  configuration, probes and scrapes the replicas, and keeps the workers alive. It sees no request.
- A worker is a whole gateway without ports: one event loop, one data plane. It is told what the supervisor knows of the
  replicas (`facts`), so that eight workers do not probe a thousand replicas eight times, and starts ready.
- The supervisor accepts connections and hands each to the worker with the fewest (`handover`). The kernel's own ways to
  spread them were measured with 64 connections on 4 workers, most on one worker over mean, median and worst of 20:
  handed over 1.00 and 1.00; SO_REUSEPORT 1.25 and 1.69, and what waits for a worker that dies is reset; one listening
  socket in all workers 2.4 and 3.8. It costs about 0.1 ms of CPU time, once per keep-alive connection.
- Orders and answers are JSON on a Unix socket pair per worker (`channel`). Its end is how a worker learns that the
  supervisor is gone: it ends what runs and exits.
- Workers share the prefix map and their load through Redis, as gateways on several machines do. If no URL is given, a
  redis-server is started on a private socket (`redis_server`). From each other they also hear at once, in memory that
  all have (`gateway.sharing.board`, `gateway.sharing.rings`).
"""
