-- claim what is due

(SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, available_at, locked_by, UTC_TIMESTAMP(6)
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
     AND available_at <= UTC_TIMESTAMP(6)
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY available_at, id
   LIMIT %s)
UNION ALL
  (SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, available_at, locked_by, UTC_TIMESTAMP(6)
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at <= UTC_TIMESTAMP(6)
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY available_at, id
   LIMIT %s);

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s, available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE id IN (%s, %s)
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT id
FROM `outbox_event`
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at = %s;

-- claim what is due at a time

SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
       first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
       stream, available_at, locked_by, UTC_TIMESTAMP(6)
FROM `outbox_event`
FORCE INDEX (outbox_event_queue_cdb4ee2a)
WHERE queue = %s
  AND available_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY available_at, id
LIMIT %s;

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s, available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE id IN (%s, %s)
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT id
FROM `outbox_event`
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at = %s;

SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
       first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
       stream, available_at, locked_by, UTC_TIMESTAMP(6)
FROM `outbox_event`
FORCE INDEX (outbox_event_queue_cdb4ee2a)
WHERE queue = %s
  AND available_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY available_at, id
LIMIT %s
FOR
UPDATE SKIP LOCKED;

-- claim by id

SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
       first_due_at, available_at, locked_by, UTC_TIMESTAMP(6)
FROM `outbox_event`
WHERE available_at <= UTC_TIMESTAMP(6)
  AND id IN (%s, %s)
  AND created_at <= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
  AND NOT (id IN (%s))
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY available_at, id
LIMIT %s;

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s, available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE id IN (%s)
  AND available_at <= %s
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)));

SELECT id
FROM `outbox_event`
WHERE id IN (%s)
  AND locked_by = %s
  AND locked_at = %s;

SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
       first_due_at, available_at, locked_by, UTC_TIMESTAMP(6)
FROM `outbox_event`
WHERE available_at <= UTC_TIMESTAMP(6)
  AND id IN (%s, %s)
  AND created_at <= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
  AND NOT (id IN (%s))
  AND (rescues = 0
       OR (rescues = 1
           AND (locked_by IS NULL
                OR locked_by = %s)))
ORDER BY available_at, id
LIMIT %s
FOR
UPDATE SKIP LOCKED;

-- claim streams

(SELECT stream, queue, rescues, due_at, locked_by, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
     AND due_at <= UTC_TIMESTAMP(6)
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY due_at
   LIMIT %s
   FOR UPDATE SKIP LOCKED)
UNION ALL
  (SELECT stream, queue, rescues, due_at, locked_by, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at <= UTC_TIMESTAMP(6)
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY due_at
   LIMIT %s
   FOR UPDATE SKIP LOCKED);

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE stream IN (%s, %s)
     AND due_at <= %s
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET rescues = e.rescues + CASE WHEN e.locked_by IS NULL
                                   OR e.locked_by = %s THEN 0 ELSE 1
                          END, locked_by = %s, locked_at = %s, due_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND;

SELECT stream
FROM `outbox_stream`
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at = %s;

-- claim streams, some excluded

(SELECT stream, queue, rescues, due_at, locked_by, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
     AND due_at <= UTC_TIMESTAMP(6)
     AND NOT (stream IN (%s))
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY due_at
   LIMIT %s
   FOR UPDATE SKIP LOCKED)
UNION ALL
  (SELECT stream, queue, rescues, due_at, locked_by, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at <= UTC_TIMESTAMP(6)
     AND NOT (stream IN (%s))
     AND (rescues = 0
          OR (rescues = 1
              AND (locked_by IS NULL
                   OR locked_by = %s)))
   ORDER BY due_at
   LIMIT %s
   FOR UPDATE SKIP LOCKED);

-- read streams

SELECT stream, seq, UTC_TIMESTAMP(6)
FROM `outbox_stream`
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

(SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, seq, status,
     (SELECT MIN(u.seq)
      FROM `outbox_event` u
      WHERE u.stream = %s
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= UTC_TIMESTAMP(6)
             OR u.locked_by IS NOT NULL))
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 0
   ORDER BY seq
   LIMIT %s)
UNION ALL
  (SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, seq, status,
     (SELECT MIN(u.seq)
      FROM `outbox_event` u
      WHERE u.stream = %s
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= UTC_TIMESTAMP(6)
             OR u.locked_by IS NOT NULL))
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 2
   ORDER BY seq
   LIMIT %s);

-- read streams, dead and due alone

SELECT stream, seq, UTC_TIMESTAMP(6)
FROM `outbox_stream`
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

(SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, seq, status,
     (SELECT MIN(u.seq)
      FROM `outbox_event` u
      WHERE u.stream = %s
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= UTC_TIMESTAMP(6)
             OR u.locked_by IS NOT NULL))
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 0
   ORDER BY seq
   LIMIT %s)
UNION ALL
  (SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, seq, status,
     (SELECT MIN(u.seq)
      FROM `outbox_event` u
      WHERE u.stream = %s
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= UTC_TIMESTAMP(6)
             OR u.locked_by IS NOT NULL))
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 2
     AND deliver_at <= UTC_TIMESTAMP(6)
   ORDER BY seq
   LIMIT %s)
UNION ALL
  (SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
          first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
          stream, seq, status,
     (SELECT MIN(u.seq)
      FROM `outbox_event` u
      WHERE u.stream = %s
        AND u.status IN (0, 2)
        AND u.status IN (0, 2, 3)
        AND (u.available_at <= UTC_TIMESTAMP(6)
             OR u.locked_by IS NOT NULL))
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 3
   ORDER BY seq
   LIMIT %s);

-- next retries

SELECT stream, MIN(deliver_at)
FROM `outbox_event`
FORCE INDEX (outbox_event_stream_cdb4ee2a)
WHERE stream IN (%s, %s)
  AND status = 2
  AND status IN (0, 2, 3)
  AND NOT EXISTS
    (SELECT 1
     FROM `outbox_event` dead
     WHERE dead.stream = `outbox_event`.stream
       AND dead.seq < `outbox_event`.seq
       AND dead.status = 3
       AND dead.status IN (0, 2, 3))
GROUP BY stream;

-- renew

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND;

SELECT UTC_TIMESTAMP(6);

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND;

SELECT id, available_at >= %s
FROM `outbox_event`
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- renew streams

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE stream IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET due_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND;

SELECT UTC_TIMESTAMP(6);

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE stream IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET due_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND;

SELECT stream, due_at >= %s
FROM `outbox_stream`
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- release

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND, locked_by = NULL, locked_at = NULL;

-- release when the lease ends

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET locked_by = NULL, locked_at = NULL;

-- release each as it was

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE e.id IN (%s, %s)
     AND e.status IN (0, 2)
     AND e.locked_by = %s
     AND e.locked_at = CAST(%s AS DATETIME(6))
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET available_at = CAST(%s AS DATETIME(6)), queue = CASE e.id WHEN %s THEN %s WHEN %s THEN %s
                                                    END, locked_by = NULL, locked_at = NULL;

SELECT id
FROM `outbox_event`
WHERE id IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- release streams

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE e.stream IN (%s, %s)
     AND e.seq = COALESCE(NULLIF(CASE e.stream WHEN %s THEN %s WHEN %s THEN %s
                                 END, -1), e.seq)
     AND e.locked_by = %s
     AND e.locked_at = CAST(%s AS DATETIME(6))
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET due_at = UTC_TIMESTAMP(6) + INTERVAL NULLIF(CASE e.stream WHEN %s THEN %s WHEN %s THEN %s
                                                END, -1) SECOND,
                                                         queue = COALESCE(NULLIF(CASE e.stream
                                                                                     WHEN %s THEN %s
                                                                                     WHEN %s THEN %s
                                                                                 END,
                                                                            ''),
                                                                   e.queue), rescues = e.rescues * %s, locked_by = NULL,
                                                         locked_at = UTC_TIMESTAMP(6);

SELECT stream, locked_by
FROM `outbox_stream`
WHERE stream IN (%s, %s);

-- hand streams back

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE stream IN (%s, %s)
     AND locked_by = %s
     AND locked_at IN (%s)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET due_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND, locked_by = NULL, locked_at = UTC_TIMESTAMP(6);

-- settle as done

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET status = 1, done_at = UTC_TIMESTAMP(6), available_at = NULL, locked_by = NULL, locked_at = NULL
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s;

-- settle as done, with a key

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET status = 1, done_at = UTC_TIMESTAMP(6), available_at = NULL, locked_by = NULL, locked_at = NULL
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM `outbox_stream` owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s);

-- delete what is done

DELETE e
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND unique_key IS NULL;

-- settle

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET status = %s, attempts = e.attempts + %s, rescues = 0, available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND,
                                                                                                        done_at = CASE
                                                                                                                      WHEN %s IS NULL THEN UTC_TIMESTAMP(6)
                                                                                                                  END,
                                                                                                                  last_error = COALESCE(%s,

                                                                                                                                 e.last_error),
                                                                                                                  cause = COALESCE(%s,

                                                                                                                            e.cause),
                                                                                                                  history = COALESCE(%s,

                                                                                                                              e.history),
                                                                                                                  queue = COALESCE(%s,

                                                                                                                            e.queue),
                                                                                                                  locked_by = NULL,
                                                                                                                  locked_at = NULL
WHERE e.id IN (%s, %s)
  AND e.attempts = CASE e.id WHEN %s THEN %s WHEN %s THEN %s
                   END
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at = CAST(%s AS DATETIME(6));

-- settle, with a key

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET status = %s, attempts = e.attempts + %s, rescues = 0, deliver_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND,
                                                                                                      done_at = CASE
                                                                                                                    WHEN %s IS NULL THEN UTC_TIMESTAMP(6)
                                                                                                                END,
                                                                                                                last_error = COALESCE(%s,

                                                                                                                               e.last_error),
                                                                                                                cause = COALESCE(%s,

                                                                                                                          e.cause),
                                                                                                                history = COALESCE(%s,

                                                                                                                            e.history),
                                                                                                                queue = COALESCE(%s,

                                                                                                                          e.queue),
                                                                                                                locked_by = NULL,
                                                                                                                locked_at = NULL
WHERE e.id IN (%s, %s)
  AND e.attempts = CASE e.id WHEN %s THEN %s WHEN %s THEN %s
                   END
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM `outbox_stream` owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s
       AND owned.locked_at = CAST(%s AS DATETIME(6)));

-- route rows

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET listener = %s, routes = %s, queue = %s, stream = CASE
                                                         WHEN `key` IS NOT NULL THEN CONCAT(%s,
                                                                                       `key`)
                                                         WHEN stream IS NOT NULL THEN CONCAT(%s,

                                                                                        SUBSTR(stream,
                                                                                          15))
                                                     END, available_at = CASE
                                                                             WHEN `key` IS NULL THEN available_at
                                                                         END, locked_by = CASE
                                                                                              WHEN `key` IS NULL THEN locked_by
                                                                                          END, locked_at = CASE
                                                                                                               WHEN `key` IS NULL THEN locked_at
                                                                                                           END
WHERE listener IS NULL
  AND id IN (%s, %s)
  AND e.status IN (0, 2)
  AND EXISTS
    (SELECT 1
     FROM `outbox_stream` owned
     WHERE owned.stream = e.stream
       AND owned.locked_by = %s
       AND owned.locked_at IN (%s));

-- add rows

INSERT INTO `outbox_event` (id,
               listener, routes, queue, stream, first_due_at, available_at, deliver_at, status, attempts,
               rescues, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, occurred_at,
               created_at, `key`, seq)
SELECT CONCAT(event_id, %s), %s, %s, %s,
       CASE WHEN `key` IS NOT NULL THEN CONCAT(%s, `key`) WHEN stream IS NOT NULL THEN CONCAT(%s,

                                                                                         SUBSTR(stream,
                                                                                           15))
       END, UTC_TIMESTAMP(6), CASE WHEN `key` IS NULL THEN UTC_TIMESTAMP(6)
                              END,
       CASE WHEN `key` IS NULL THEN deliver_at
       END, 0, 0, 0, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, occurred_at,
       created_at, `key`, seq
FROM `outbox_event`
WHERE id IN (%s, %s)
  AND routes = %s ON DUPLICATE KEY
  UPDATE id =
  VALUES(id);

-- lock an event

SELECT id
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id >= %s
  AND id < %s
  AND event_id = %s;

-- lock rows

SELECT id, event_id, routes
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id IN (%s, %s)
ORDER BY id
FOR
UPDATE;

-- note a receipt

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET routes = %s
WHERE id IN (%s);

-- note a lost worker

UPDATE `outbox_event` e
FORCE INDEX (PRIMARY)
SET rescues = %s, history = CASE WHEN history IS NULL THEN %s ELSE CONCAT(SUBSTR(history,
                                                                            1, LENGTH(history) - 1),
                                                                     %s)
                            END
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at IN (%s);

-- keep a stream suspected

UPDATE `outbox_stream` e
FORCE INDEX (PRIMARY)
SET rescues = %s
WHERE stream IN (%s, %s)
  AND locked_by = %s
  AND locked_at IN (%s);

-- read what is pending in slots

(SELECT stream, seq, id, locked_by
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 0
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000)
UNION ALL
  (SELECT stream, seq, id, locked_by
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 2
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000)
UNION ALL
  (SELECT stream, seq, id, locked_by
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 0
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000)
UNION ALL
  (SELECT stream, seq, id, locked_by
   FROM `outbox_event`
   FORCE INDEX (outbox_event_stream_cdb4ee2a)
   WHERE stream = %s
     AND status = 2
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR locked_by = %s)
   ORDER BY seq DESC, id DESC
   LIMIT 1000);

-- lease the newest of slots

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND status IN (0, 2)
     AND (locked_by IS NULL
          AND queue NOT LIKE 'paused:%%'
          AND rescues < 2)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET rescues = CASE WHEN rescues < %s THEN %s ELSE rescues
              END, locked_by = %s, locked_at = %s, available_at = UTC_TIMESTAMP(6) + INTERVAL %s SECOND;

SELECT id, attempts, rescues, listener, routes, queue, history, occurred_at, created_at, deliver_at,
       first_due_at, event_id, event_type, aggregate_type, aggregate_id, tenant_id, payload, headers, unique_key, `key`,
       stream
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id IN (%s, %s)
  AND e.status IN (0, 2)
  AND e.locked_by = %s
  AND e.locked_at IN (%s);

-- end what is coalesced

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND status IN (0, 2)
     AND ((locked_by IS NULL
           AND queue NOT LIKE 'paused:%%'
           AND rescues < 2)
          OR (locked_by = %s
              AND locked_at = %s))
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET status = 1, done_at = UTC_TIMESTAMP(6), available_at = NULL, result = %s, locked_by = NULL,
                                                                          locked_at = NULL;

-- find suspects

(SELECT 'outbox_event', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM `outbox_event`
      FORCE INDEX (outbox_event_queue_cdb4ee2a)
      WHERE queue = %s
        AND available_at <= UTC_TIMESTAMP(6)
      ORDER BY available_at, id
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
  (SELECT 'outbox_event', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM `outbox_event`
      FORCE INDEX (outbox_event_queue_cdb4ee2a)
      WHERE queue = %s
        AND available_at <= UTC_TIMESTAMP(6)
      ORDER BY available_at, id
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
  (SELECT 'outbox_stream', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM `outbox_stream`
      FORCE INDEX (outbox_stream_queue_cdb4ee2a)
      WHERE queue = %s
        AND due_at <= UTC_TIMESTAMP(6)
      ORDER BY due_at
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)))
UNION ALL
  (SELECT 'outbox_stream', MAX(queue)
   FROM
     (SELECT queue, rescues, locked_by
      FROM `outbox_stream`
      FORCE INDEX (outbox_stream_queue_cdb4ee2a)
      WHERE queue = %s
        AND due_at <= UTC_TIMESTAMP(6)
      ORDER BY due_at
      LIMIT %s) due
   WHERE (rescues > 1
          OR (rescues = 1
              AND locked_by <> %s)));

-- when is the next due

(SELECT queue, available_at, UTC_TIMESTAMP(6)
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
   ORDER BY available_at, id
   LIMIT 1)
UNION ALL
  (SELECT queue, due_at, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at >= UTC_TIMESTAMP(6) + INTERVAL %s SECOND
   ORDER BY due_at
   LIMIT 1);

-- is anything due

(SELECT queue, available_at, UTC_TIMESTAMP(6)
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at <= UTC_TIMESTAMP(6)
   ORDER BY available_at, id
   LIMIT 1)
UNION ALL
  (SELECT queue, due_at, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at <= UTC_TIMESTAMP(6)
   ORDER BY due_at
   LIMIT 1);

-- other queues

(SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1);

(SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1);

(SELECT queue, available_at, UTC_TIMESTAMP(6)
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at >= '1000-01-01'
   ORDER BY available_at, id
   LIMIT 1)
UNION ALL
  (SELECT queue, due_at, UTC_TIMESTAMP(6)
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue = %s
     AND due_at >= '1000-01-01'
   ORDER BY due_at
   LIMIT 1);

-- move events

SELECT id
FROM `outbox_event`
FORCE INDEX (outbox_event_queue_cdb4ee2a)
WHERE queue = %s
  AND available_at <= UTC_TIMESTAMP(6)
ORDER BY available_at, id
LIMIT %s;

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s)
     AND queue = %s
     AND available_at <= UTC_TIMESTAMP(6)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET queue = %s;

-- move streams

SELECT stream
FROM `outbox_stream`
FORCE INDEX (outbox_stream_queue_cdb4ee2a)
WHERE queue = %s
  AND due_at <= UTC_TIMESTAMP(6)
ORDER BY due_at
LIMIT %s;

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE stream IN (%s)
     AND queue = %s
     AND due_at <= UTC_TIMESTAMP(6)
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET queue = %s;

-- wake streams

INSERT INTO `outbox_stream` (stream, `key`, lane, seq, due_at, queue)
VALUES (%s, %s, %s, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + %s), UTC_TIMESTAMP(6), %s), (%s,
                                                                                                                             %s,
                                                                                                                             %s,
                                                                                                                             LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND,

                                                                                                                                              '1970-01-01',
                                                                                                                                              UTC_TIMESTAMP(6)) + %s),
                                                                                                                             UTC_TIMESTAMP(6),
                                                                                                                             %s) AS new ON DUPLICATE KEY
UPDATE queue = CASE
                   WHEN (`outbox_stream`.due_at IS NULL
                         OR `outbox_stream`.queue LIKE 'paused:%%') THEN new.queue ELSE `outbox_stream`.queue
               END,
               seq = LAST_INSERT_ID(`outbox_stream`.seq + 1 + new.seq - TIMESTAMPDIFF(MICROSECOND,
                                                                          '1970-01-01',
                                                                          UTC_TIMESTAMP(6))), due_at = CASE
                                                                                                           WHEN `outbox_stream`.locked_by IS NULL THEN UTC_TIMESTAMP(6)
                                                                                                           ELSE `outbox_stream`.due_at
                                                                                                       END;

-- number events

INSERT INTO `outbox_stream` (stream, `key`, lane, seq, due_at, queue)
VALUES (%s, %s, %s, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) + %s), UTC_TIMESTAMP(6), %s), (%s,
                                                                                                                             %s,
                                                                                                                             %s,
                                                                                                                             LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND,

                                                                                                                                              '1970-01-01',
                                                                                                                                              UTC_TIMESTAMP(6)) + %s),
                                                                                                                             NULL,
                                                                                                                             %s) AS new ON DUPLICATE KEY
UPDATE queue = CASE WHEN `outbox_stream`.due_at IS NULL THEN new.queue ELSE `outbox_stream`.queue
               END,
               seq = LAST_INSERT_ID(`outbox_stream`.seq + 1 + new.seq - TIMESTAMPDIFF(MICROSECOND,
                                                                          '1970-01-01',
                                                                          UTC_TIMESTAMP(6))), due_at = CASE
                                                                                                           WHEN new.due_at IS NULL THEN `outbox_stream`.due_at
                                                                                                           ELSE COALESCE(`outbox_stream`.due_at,

                                                                                                                  UTC_TIMESTAMP(6))
                                                                                                       END;

SELECT stream, seq
FROM `outbox_stream`
WHERE stream IN (%s, %s);

-- what is due first

(SELECT id, event_type, listener, `key`
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at <= UTC_TIMESTAMP(6)
   ORDER BY available_at, id
   LIMIT %s)
UNION ALL
  (SELECT id, event_type, listener, `key`
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue = %s
     AND available_at <= UTC_TIMESTAMP(6)
   ORDER BY available_at, id
   LIMIT %s);

-- park rows

SELECT id
FROM `outbox_pause`
WHERE id IN (%s) LOCK IN SHARE MODE;

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s, %s)
     AND locked_by IS NULL
     AND available_at IS NOT NULL
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET queue = %s;

-- park streams

SELECT id
FROM `outbox_pause`
WHERE id IN (%s) LOCK IN SHARE MODE;

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE e.stream IN (%s, %s)
     AND e.seq = COALESCE(NULLIF(%s, -1), e.seq)
     AND e.locked_by = %s
     AND e.locked_at = CAST(%s AS DATETIME(6))
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET due_at = UTC_TIMESTAMP(6) + INTERVAL NULLIF(%s, -1) SECOND, queue = COALESCE(NULLIF(%s,
                                                                                   ''),
                                                                          e.queue),
                                                        rescues = e.rescues * %s, locked_by = NULL,
                                                        locked_at = UTC_TIMESTAMP(6);

SELECT stream, locked_by
FROM `outbox_stream`
WHERE stream IN (%s, %s);

-- bring rows home

SELECT id
FROM `outbox_event`
FORCE INDEX (outbox_event_queue_cdb4ee2a)
WHERE queue = %s
  AND available_at IS NOT NULL
ORDER BY available_at, id
LIMIT %s;

SELECT id, listener, queue
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id IN (%s);

UPDATE
  (SELECT id
   FROM `outbox_event` e
   FORCE INDEX (PRIMARY)
   WHERE id IN (%s)
     AND queue = %s
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_event` e
FORCE INDEX (PRIMARY) ON e.id = unlocked.id
SET queue = %s, first_due_at = CASE WHEN e.available_at > UTC_TIMESTAMP(6) THEN e.first_due_at ELSE UTC_TIMESTAMP(6)
                               END;

-- bring streams home

SELECT stream
FROM `outbox_stream`
FORCE INDEX (outbox_stream_queue_cdb4ee2a)
WHERE queue = %s
  AND due_at IS NOT NULL
ORDER BY due_at
LIMIT %s;

(SELECT stream, seq, id
   FROM `outbox_event`
   WHERE stream = %s
     AND status = 0
   ORDER BY seq
   LIMIT 1)
UNION ALL
  (SELECT stream, seq, id
   FROM `outbox_event`
   WHERE stream = %s
     AND status = 2
   ORDER BY seq
   LIMIT 1);

SELECT id, listener, queue
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id IN (%s);

UPDATE
  (SELECT stream
   FROM `outbox_stream` e
   FORCE INDEX (PRIMARY)
   WHERE stream IN (%s)
     AND queue = %s
   LIMIT %s
   FOR UPDATE SKIP LOCKED) unlocked
STRAIGHT_JOIN `outbox_stream` e
FORCE INDEX (PRIMARY) ON e.stream = unlocked.stream
SET queue = %s;

-- what is parked without its pause

SELECT id
FROM `outbox_pause`;

(SELECT queue
   FROM `outbox_event`
   FORCE INDEX (outbox_event_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, available_at
   LIMIT 1)
UNION ALL
  (SELECT queue
   FROM `outbox_stream`
   FORCE INDEX (outbox_stream_queue_cdb4ee2a)
   WHERE queue > %s
     AND queue < %s
     AND 1 = 1
   ORDER BY queue, due_at
   LIMIT 1);

-- give streams a new version

INSERT INTO `outbox_stream` (stream, `key`, lane, seq, due_at, queue)
VALUES (%s, %s, %s, LAST_INSERT_ID(TIMESTAMPDIFF(MICROSECOND,
                                     '1970-01-01', UTC_TIMESTAMP(6)) + %s),
        UTC_TIMESTAMP(6), %s) AS new ON DUPLICATE KEY
UPDATE queue = CASE WHEN `outbox_stream`.due_at IS NULL THEN new.queue ELSE `outbox_stream`.queue
               END,
               seq = LAST_INSERT_ID(`outbox_stream`.seq + 1 + new.seq - TIMESTAMPDIFF(MICROSECOND,
                                                                          '1970-01-01',
                                                                          UTC_TIMESTAMP(6))), due_at = COALESCE(`outbox_stream`.due_at,

                                                                                                         UTC_TIMESTAMP(6));

-- take a named lease

UPDATE `outbox_lease`
SET locked_by = %s, locked_until = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE name = %s
  AND (locked_by = %s
       OR locked_by IS NULL
       OR locked_until <= UTC_TIMESTAMP(6));

INSERT INTO `outbox_lease` (name)
VALUES (%s);

-- renew a named lease

UPDATE `outbox_lease`
SET state = %s, locked_by = %s, locked_until = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE name = %s
  AND locked_by = %s;

-- release a named lease

UPDATE `outbox_lease`
SET state = %s, locked_by = NULL, locked_until = NULL
WHERE name = %s
  AND locked_by = %s;

-- what is paused

SELECT id, kind, name, UTC_TIMESTAMP(6), until, pause_seconds
FROM `outbox_pause`
UNION ALL
SELECT id, 'operation', '', UTC_TIMESTAMP(6), NULL, NULL
FROM `outbox_operation`
WHERE state = 'open';

-- open a breaker

INSERT INTO `outbox_pause` (kind,
               name, reason, paused_at, paused_by, until, pause_seconds)
VALUES ('breaker', %s, %s, UTC_TIMESTAMP(6), '', UTC_TIMESTAMP(6) + INTERVAL %s SECOND, %s);

-- win the probe of a breaker

UPDATE `outbox_pause`
SET until = UTC_TIMESTAMP(6) + INTERVAL %s SECOND
WHERE kind = 'breaker'
  AND name = %s
  AND until <= UTC_TIMESTAMP(6);

-- prolong a breaker

UPDATE `outbox_pause`
SET until = UTC_TIMESTAMP(6) + INTERVAL %s SECOND, pause_seconds = %s
WHERE kind = 'breaker'
  AND name = %s;

-- close a breaker

DELETE
FROM `outbox_pause`
WHERE kind = 'breaker'
  AND name = %s;

-- receive a message

INSERT INTO `outbox_inbox` (source, message_id, received_at)
VALUES (%s, %s, UTC_TIMESTAMP(6));

-- delete events

DELETE e
FROM `outbox_event` e
FORCE INDEX (PRIMARY)
WHERE id IN (%s, %s)
  AND status >= 0;

-- delete streams

DELETE e
FROM `outbox_stream` e
FORCE INDEX (PRIMARY)
WHERE stream IN (%s, %s)
  AND seq >= 0;
